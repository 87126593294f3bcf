"""PTX text → `Kernel`: a flat list of instructions with names resolved (PTX ISA, chapters 4 and 5).

Code that frameworks write by hand makes three demands beyond the compiler's output: inline assembly `{ .reg .pred P1;
WAIT: … }` repeats names of registers and labels, so names declared in an inner scope are renamed `name@scope`; some of
it declares registers in the function's own scope; and braces also delimit vector operands, which differ from a scope in
that a scope's brace starts a statement.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

TYPE_BITS = {"pred": 1} | {f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)}
TYPE_BITS |= {"f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "f64": 64, "b128": 128}


class PTXSyntaxError(ValueError):
    """The text is not what the parser knows of PTX."""


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: where it lies in the parameter space, in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class SharedSymbol:
    """A variable in shared memory; `size` None: the dynamic one."""

    align: int
    size: int | None


@dataclass(frozen=True)
class LocalSymbol:
    """A variable in local memory, `offset` bytes into every lane's own."""

    offset: int
    size: int


@dataclass(frozen=True)
class Instruction:
    """One instruction, `@!p opcode operands`, with names resolved."""

    opcode: str
    operands: tuple[str, ...]
    predicate: str | None = None
    is_negated: bool = False
    line: int = 0  # of the PTX text, from 1
    source: str | None = None  # "file:line" of the program, where the compiler says it

    @property
    def words(self) -> list[str]:
        """The opcode's parts: "mbarrier.try_wait.parity" → ["mbarrier", "try_wait", "parity"]."""
        return self.opcode.split(".")

    def __str__(self) -> str:
        guard = f"@{'!' if self.is_negated else ''}{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}"

    def where(self) -> str:
        return f"PTX line {self.line}" + (f" ({self.source})" if self.source else "")


@dataclass
class Kernel:
    """A parsed entry."""

    name: str
    parameters: tuple[Parameter, ...]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label → index of the instruction behind it
    wide_registers: set[str] = field(default_factory=set)  # of 128 bits
    vector_registers: dict[str, int] = field(default_factory=dict)  # name → length; elements are name.x … name.w
    shared: dict[str, SharedSymbol] = field(default_factory=dict)
    local: dict[str, LocalSymbol] = field(default_factory=dict)
    local_bytes: int = 0


_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr(?:\s+\.(?:const|global|local|shared))?(?:\s+\.align\s+\d+)?\s+)?"  # says where a pointer points
    r"(?P<name>[\w$]+)\s*(?:\[\s*(?P<count>\d+)\s*\])?"
)


def entry_names(ptx: str) -> list[str]:
    """The kernels of a module."""
    return re.findall(r"\.entry\s+([\w$]+)", ptx)


@functools.lru_cache(maxsize=256)
def parse_parameters(ptx: str, entry: str) -> tuple[Parameter, ...]:
    """The parameters of an entry, laid out as the ISA says: each at the next multiple of its alignment.

    Raises:
        KeyError: no such entry.    PTXSyntaxError: a declaration of an unknown form.
    """
    parameters, end = [], 0
    text = _without_comments(_entry(ptx, entry)["parameters"] or "")
    for declaration in filter(None, map(str.strip, text.split(","))):
        found = _PARAMETER.fullmatch(declaration)
        if found is None or found["type"] not in TYPE_BITS:
            raise PTXSyntaxError(f"kernel {entry}: can't read the parameter declaration {declaration!r}")
        element = TYPE_BITS[found["type"]] // 8
        align = max(int(found["align"] or 1), element)
        offset = -(-end // align) * align
        end = offset + element * int(found["count"] or 1)
        parameters.append(Parameter(found["name"], offset, end - offset))
    return tuple(parameters)


def parse_kernel(ptx: str, entry: str) -> Kernel:
    """The kernel named `entry`.

    Raises:
        KeyError: no such entry.    PTXSyntaxError: braces that do not match.
    """
    header = _entry(ptx, entry)
    begin = ptx.index("{", header.end())
    end = _matching_brace(ptx, begin)
    body = _without_comments(ptx[begin + 1 : end])
    body = re.sub(r"^(\s*\.loc\s[^\n;]*)$", r"\1;", body, flags=re.M)  # the only directive that ends with its line
    kernel = Kernel(entry, parse_parameters(ptx, entry), shared=_shared_symbols(ptx))
    _Body(kernel, dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx))).read(body, ptx.count("\n", 0, begin) + 1)
    return kernel


def split_operands(text: str) -> list[str]:
    """Operands at the commas outside brackets and braces."""
    operands, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            operands.append(current.strip())
            current = ""
        else:
            current += character
    return [*operands, current.strip()] if current.strip() else operands


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.S)


def _entry(ptx: str, entry: str) -> re.Match[str]:
    found = re.search(rf"\.entry\s+{re.escape(entry)}(?![\w$])(?:\s*\((?P<parameters>[^)]*)\))?", ptx)
    if found is None:
        raise KeyError(f"no .entry {entry} in the PTX; it has {', '.join(entry_names(ptx)) or 'none'}")
    return found


def _matching_brace(text: str, begin: int) -> int:
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    raise PTXSyntaxError("unbalanced braces")


def _shared_symbols(ptx: str) -> dict[str, SharedSymbol]:
    pattern = r"\.shared\s+\.align\s+(\d+)\s+\.b(\d+)\s+([\w$]+)\[(\d*)\]"
    return {
        name: SharedSymbol(int(align), int(count) * int(bits) // 8 if count else None)
        for align, bits, name, count in re.findall(pattern, ptx)
    }


_LABEL = re.compile(r"\s*([\w$]+)\s*:(?!:)\s*")
_ONLY_LABELS = re.compile(r"\s*(?:[\w$]+\s*:(?!:)\s*)*")
_IDENTIFIER = re.compile(r"(?<![\w$%.:])([A-Za-z_$][\w$]*)")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")


@dataclass(frozen=True)
class _Statement:
    scopes: tuple[int, ...]  # from the function's to the innermost
    text: str
    line: int
    source: str | None
    is_label: bool = False


class _Body:
    """Reads a function's body into a kernel: first scopes and declarations, then instructions with names resolved."""

    def __init__(self, kernel: Kernel, files: dict[str, str]):
        self.kernel, self.files = kernel, files
        self.declared: dict[int, set[str]] = {0: set()}

    def read(self, body: str, first_line: int) -> None:
        for statement in list(self._scoped(body, first_line)):
            if statement.is_label:
                label = self._resolve(statement.scopes, statement.text)
                self.kernel.labels[label] = len(self.kernel.instructions)
            else:
                self.kernel.instructions.append(self._instruction(statement))

    def _scoped(self, body: str, first_line: int) -> Iterator[_Statement]:
        scopes, source = [0], None
        for text, line in _statements(body, first_line):
            if text == "{":
                scopes.append(len(self.declared))
                self.declared[scopes[-1]] = set()
                continue
            if text == "}":
                scopes.pop()
                continue
            while label := _LABEL.match(text):
                self.declared[scopes[-1]].add(label[1])
                yield _Statement(tuple(scopes), label[1], line, source, is_label=True)
                line += text.count("\n", 0, label.end())
                text = text[label.end() :]
            if text.startswith(".reg"):
                self._declare(scopes[-1], text)
            elif text.startswith(".local"):
                self._declare_local(scopes[-1], text)
            elif text.startswith(".loc"):
                _, file, at, *_ = text.split()
                source = f"{self.files.get(file, file)}:{at}"
            elif text and not text.startswith("."):
                yield _Statement(tuple(scopes), text, line, source)

    def _declare(self, scope: int, text: str) -> None:
        """`.reg .v4 .b32 a, b<7>;`"""
        words = text.split()
        first_name = next(i for i, word in enumerate(words) if i and not word.startswith("."))
        kinds = words[1:first_name]
        length = next((int(kind[2:]) for kind in kinds if kind in (".v2", ".v4")), 0)
        for name in " ".join(words[first_name:]).split(","):
            name = name.strip().partition("<")[0]
            self.declared[scope].add(name)
            full_name = f"{name}@{scope}" if scope else name
            if ".b128" in kinds:
                self.kernel.wide_registers.add(full_name)
            if length:
                self.kernel.vector_registers[full_name] = length

    def _declare_local(self, scope: int, text: str) -> None:
        """`.local .align 16 .b8 __local_depot0[64];`: space that compilers use for arrays with a variable index."""
        found = re.fullmatch(r"\.local\s+(?:\.align\s+(\d+)\s+)?\.([busf]\d+)\s+([\w$]+)((?:\[\d+\])*)", text)
        if found is None:
            raise PTXSyntaxError(f"declaration {text!r}; known is .local [.align A] .type name[N]")
        size = TYPE_BITS[found[2]] // 8
        align = max(size, int(found[1] or 1))
        for count in re.findall(r"\d+", found[4]):
            size *= int(count)
        offset = -(-self.kernel.local_bytes // align) * align
        self.declared[scope].add(found[3])
        self.kernel.local[f"{found[3]}@{scope}" if scope else found[3]] = LocalSymbol(offset, size)
        self.kernel.local_bytes = -(-(offset + size) // 16) * 16

    def _resolve(self, scopes: tuple[int, ...], name: str) -> str:
        scope = next((scope for scope in reversed(scopes) if scope and name in self.declared[scope]), 0)
        return f"{name}@{scope}" if scope else name

    def _instruction(self, statement: _Statement) -> Instruction:
        text, predicate, is_negated = statement.text, None, False
        if guard := _GUARD.match(text):
            predicate, is_negated = self._resolve(statement.scopes, guard[2]), guard[1] == "!"
            text = text[guard.end() :]
        opcode, rest = re.fullmatch(r"(\S+)\s*(.*)", text, re.S).groups()
        operands = tuple(
            _IDENTIFIER.sub(lambda name: self._resolve(statement.scopes, name[1]), operand)
            for operand in split_operands(rest)
        )
        return Instruction(opcode, operands, predicate, is_negated, statement.line, statement.source)


def _statements(body: str, line: int) -> Iterator[tuple[str, int]]:
    """(text, line) of each statement; the braces of scopes are statements of their own."""
    current, start, depth = "", line, 0
    for token in re.findall(r"[^;{}]+|[;{}]", body):
        if depth == 0 and token in "{}" and _ONLY_LABELS.fullmatch(current):
            if current.strip():
                yield current.strip(), start
            yield token, line
            current = ""
        elif token == ";" and depth == 0:
            yield current.strip(), start
            current = ""
        else:
            depth += (token == "{") - (token == "}")
            if not current.strip():
                start = line + token[: len(token) - len(token.lstrip())].count("\n")
            current += token
        line += token.count("\n")
