"""Two things read from ELF files: the extent of a GPU binary, and the names that an object file leaves open."""

import struct
from collections.abc import Callable

ELF_MAGIC = b"\x7fELF"
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2  # sh_type
_UNDEFINED = 0  # st_shndx


def elf_files(image: bytes) -> list[bytes]:
    """The ELF files inside a GPU binary ("fatbin": uncompressed entries, each behind its own header), in order."""
    found = []
    start = image.find(ELF_MAGIC)
    while start >= 0:
        size = _elf_size(image, start)
        found.append(image[start : start + size])
        start = image.find(ELF_MAGIC, start + max(size, len(ELF_MAGIC)))
    return found


def _elf_size(image: bytes, start: int) -> int:
    """Bytes of the file: the end of whatever lies last, program headers, section headers or contents."""
    header = _HEADER.unpack_from(image, start)
    program_offset, section_offset = header[5], header[6]
    program_bytes, num_programs, section_bytes, num_sections = header[9:13]
    end = max(program_offset + program_bytes * num_programs, section_offset + section_bytes * num_sections)
    for index in range(num_sections):
        _, kind, _, _, offset, size, *_ = _SECTION.unpack_from(image, start + section_offset + index * section_bytes)
        if kind != 8:  # SHT_NOBITS occupies no file space
            end = max(end, offset + size)
    return end


def rename_undefined(content: bytes, rename: Callable[[str], str | None]) -> bytes:
    """An object file (ELF, 64 bits) in which undefined symbols have other names.

    `rename` gives the new name, or None to keep the old one. The string table is copied to the end of the file with the
    new names behind the old ones, since names may share their letters with other names.
    """
    if content[:4] != ELF_MAGIC:
        raise ValueError(f"expected an ELF object file, got bytes that start with {content[:4]!r}")
    output = bytearray(content)
    header = _HEADER.unpack_from(content)
    section_offset, section_bytes, num_sections = header[6], header[11], header[12]
    places = [section_offset + index * section_bytes for index in range(num_sections)]
    sections = [_SECTION.unpack_from(content, place) for place in places]
    for _, kind, _, _, offset, size, strings_index, *_ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        strings_offset, strings_size = sections[strings_index][4:6]
        strings = bytearray(content[strings_offset : strings_offset + strings_size])
        for place in range(offset, offset + size, _SYMBOL.size):
            name_offset, info, other, section, value, length = _SYMBOL.unpack_from(content, place)
            if section != _UNDEFINED or name_offset == 0:
                continue
            name = strings[name_offset : strings.index(0, name_offset)].decode()
            if new_name := rename(name):
                _SYMBOL.pack_into(output, place, len(strings), info, other, section, value, length)
                strings += new_name.encode() + b"\0"
        moved = list(sections[strings_index])
        moved[4:6] = len(output), len(strings)
        _SECTION.pack_into(output, places[strings_index], *moved)
        output += strings
    return bytes(output)
