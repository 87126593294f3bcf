"""Finds the PTX of a launched kernel.

A launch names a kernel of a loaded GPU binary. Names are not unique (compile-time constants of a kernel are not part
of them), so the way goes from the library's handle to the bytes of the binary that was loaded, and from these to the
PTX that the DSL wrote when it compiled them.

The pairs are kept in memory and as files ("sidecars") `<cache>/ptx/<sha256 of the binary>.ptx.gz`: a kernel that a
framework loads from its own cache of object files was compiled in another process.
"""

import ctypes
import gzip
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from ptxsim.host.build import cache_folder, write_atomically
from ptxsim.host.objects import elf_files
from ptxsim.ptx.parse import entry_names

_NAME_COMMENT = "\n// ptxsim: compiled as "  # last line of a sidecar, so that the lines before keep their numbers


class PtxNotFound(LookupError):
    """A kernel was launched whose PTX is not known."""


@dataclass(frozen=True)
class Module:
    """PTX of one GPU binary, and the name under which the DSL compiled it."""

    ptx: str
    source: str | None = None


@dataclass
class ArtifactStore:
    """PTX by binary, and binaries by library. One for the process: libraries outlive the sessions that load them."""

    modules: dict[str, Module] = field(default_factory=dict)  # by the binary's sha256
    binaries: dict[int, list[str]] = field(default_factory=dict)  # hashes of each library's binaries

    def add(self, cubin: bytes, ptx: str, source: str | None = None) -> None:
        """Remember what was compiled, in memory and as a sidecar."""
        key = _key(cubin)
        if key in self.modules:
            return
        self.modules[key] = Module(ptx, source)
        path = sidecar_path(key)
        if not path.exists():
            text = ptx + (_NAME_COMMENT + source if source else "")
            write_atomically(path, gzip.compress(text.encode(), mtime=0))

    def load_library(self, library: int, image: int, num_bytes: int) -> None:
        """Note which binaries a library holds. image: address of the loaded fatbin or ELF file."""
        content = ctypes.string_at(image, num_bytes)
        self.binaries[library] = [_key(cubin) for cubin in elf_files(content)]

    def find(self, library: int, kernel: str) -> Module:
        """The module of a kernel of a loaded library.

        Raises:
            PtxNotFound: neither this process nor an earlier one with the same cache folder compiled it.
        """
        keys = self.binaries.get(library, [])
        for key in keys:
            module = self.modules.get(key) or self._read_sidecar(key)
            if module is not None and kernel in entry_names(module.ptx):
                return module
        raise PtxNotFound(
            f"no PTX for kernel {kernel}: it was compiled outside the simulator, or its sidecar "
            f"({', '.join(str(sidecar_path(key)) for key in keys) or 'its library holds no ELF file'}) is gone. "
            "Compile it inside `with ptxsim.simulate(...)`, or clear the object-file cache that it was loaded from "
            "(quack: QUACK_CACHE_DIR, FlashAttention: FLASH_ATTENTION_CUTE_DSL_CACHE_DIR)"
        )

    def _read_sidecar(self, key: str) -> Module | None:
        path = sidecar_path(key)
        if not path.exists():
            return None
        ptx, _, source = gzip.decompress(path.read_bytes()).decode().partition(_NAME_COMMENT)
        self.modules[key] = Module(ptx, source or None)
        return self.modules[key]


STORE = ArtifactStore()


def sidecar_path(key: str) -> Path:
    return cache_folder() / "ptx" / f"{key}.ptx.gz"


def _key(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()
