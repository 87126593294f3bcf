"""The rules that the source tree keeps, as functions from a file's syntax tree to its violations.

A rule takes one `Source` and yields sentences "path:line: what is wrong"; the two rules about names and documents
take paths and text. `test_architecture.py` applies them to the repository and shows that each can fail.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pma", "ptxsim", "tests", "examples", "benchmarks", "scripts")
FLOORS = {
    "checks": 0,
    "numerics": 1,
    "jagged": 1,
    "layouts": 2,
    "reference": 3,
    "kernels": 4,
    "ops": 5,
    "functional": 6,
    "modules": 7,
    "__init__": 8,
    "testing": 9,  # beside the building: imports anything, imported by nothing in it
}
KERNEL_DSL = {"cutlass", "quack"}
TORCHREC = {"torchrec", "fbgemm_gpu"}
OUTSIDE = {"ptxsim", "tests", "examples", "benchmarks", "scripts"}
HEAVY_MODULES = KERNEL_DSL | TORCHREC

FILE_LINES, KERNEL_FILE_LINES = 600, 900
FUNCTION_LINES, KERNEL_METHOD_LINES = 80, 150
PARAMETERS = 8

VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
SCHEMA_DECORATORS = {"custom_op", "triton_op", "define", "impl"}
AUTOGRAD_METHODS = {"forward", "backward", "setup_context"}
DOCUMENTS = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "docs/distributed.md")
DOCUMENT_SUFFIXES = {".py", ".md", ".toml", ".cfg", ".txt"}
DOCUMENT_FOLDERS = {*FOLDERS, "docs", "requirements", ".ci"}


@dataclass(frozen=True)
class Source:
    """A Python file: its path from the repository's root, its text and its syntax tree."""

    path: PurePosixPath
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str | PurePosixPath, text: str) -> "Source":
        return cls(PurePosixPath(path), text, ast.parse(text))

    @property
    def unit(self) -> str | None:
        """The part of `pma` that the file belongs to ("jagged", "checks", …), None outside `pma`."""
        return self.path.with_suffix("").parts[1] if self.path.parts[0] == "pma" else None

    @property
    def is_kernel(self) -> bool:
        return self.unit == "kernels"

    def at(self, line: int, message: str) -> str:
        return f"{self.path}:{line}: {message}"


@dataclass(frozen=True)
class Import:
    """One imported module. `is_lazy`: inside a function. `is_type_only`: under `if TYPE_CHECKING`."""

    module: str
    line: int
    is_lazy: bool
    is_type_only: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def unit(self) -> str | None:
        """The part of `pma` that is imported, None for other packages."""
        top, _, rest = self.module.partition(".")
        return (rest.partition(".")[0] or "__init__") if top == "pma" else None


Rule = Callable[[Source], Iterator[str]]


def repository_sources() -> Iterator[Source]:
    for path in repository_paths():
        if path.suffix == ".py":
            yield Source.parse(path, (ROOT / path).read_text())


def repository_paths(folders: Iterable[str] = FOLDERS) -> list[PurePosixPath]:
    """Files of the given folders and of the root, without hidden files and caches."""
    found = list(ROOT.iterdir())
    for folder in folders:
        found += (ROOT / folder).rglob("*")
    paths = sorted(PurePosixPath(path.relative_to(ROOT).as_posix()) for path in found if path.is_file())
    return [path for path in paths if not path.name.startswith(".") and "__pycache__" not in path.parts]


# ---------------------------------------------------------------------------------------------- imports


def imports(source: Source) -> Iterator[Import]:
    """Every import of a file, `import_module("…")` with a literal name included."""

    def walk(node: ast.AST, is_lazy: bool, is_type_only: bool) -> Iterator[Import]:
        for module in _modules_named(node, source.path):
            yield Import(module, getattr(node, "lineno", 1), is_lazy, is_type_only)
        is_lazy |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else ()
        for child in ast.iter_child_nodes(node):
            yield from walk(child, is_lazy, is_type_only or child in guarded)

    return walk(source.tree, False, False)


def _modules_named(node: ast.AST, path: PurePosixPath) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = path.parent.parts[: len(path.parent.parts) + 1 - node.level] if node.level else ()
        module = ".".join((*parents, *([node.module] if node.module else [])))
        if module != "pma":
            return [module]
        return [f"pma.{alias.name}" if alias.name in FLOORS else "pma" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = ast.unparse(node.func).rpartition(".")[2]
        return [str(node.args[0].value)] if function in {"import_module", "__import__"} else []
    return []


def import_arrows(source: Source) -> Iterator[str]:
    """A file of `pma` imports from floors below its own and from its own package, nothing else of the project."""
    if source.path.parts[0] == "ptxsim":
        yield from (source.at(i.line, "ptxsim may not import pma") for i in imports(source) if i.top == "pma")
    if source.unit is None:
        return
    if source.unit not in FLOORS:
        yield source.at(1, f"pma/{source.unit} has no floor")
        return
    is_package = len(source.path.parts) > 2
    for found in imports(source):
        if found.top in OUTSIDE:
            yield source.at(found.line, f"pma may not import {found.top}")
        if found.unit is None or (is_package and found.unit == source.unit):
            continue
        if found.unit not in FLOORS:
            yield source.at(found.line, f"pma.{found.unit} has no floor")
        elif FLOORS[found.unit] >= FLOORS[source.unit]:
            yield source.at(found.line, f"pma.{source.unit} may not import pma.{found.unit}: not a floor below it")


def lazy_imports(source: Source) -> Iterator[str]:
    """Inside a function of `pma`, only `pma/ops` imports from `pma`, and only `pma.kernels`."""
    for found in imports(source) if source.unit else ():
        if found.is_lazy and found.unit and (source.unit, found.unit) != ("ops", "kernels"):
            yield source.at(found.line, f"import {found.module} belongs at the top of the file")


def heavy_imports(source: Source) -> Iterator[str]:
    """Only `pma/kernels` imports the kernel DSL; only functions of `pma/jagged` import TorchRec (types are free)."""
    for found in imports(source) if source.unit else ():
        if found.top in KERNEL_DSL and not source.is_kernel:
            yield source.at(found.line, f"only pma/kernels may import {found.top}")
        is_allowed = found.is_type_only or (source.unit == "jagged" and found.is_lazy)
        if found.top in TORCHREC and not is_allowed:
            yield source.at(found.line, f"only functions in pma/jagged may import {found.top}")


def empty_kernels_package(source: Source) -> Iterator[str]:
    """`pma/kernels/__init__.py` is empty, so that a kernel's spec can be imported without the DSL."""
    if source.path == PurePosixPath("pma/kernels/__init__.py") and source.tree.body:
        yield source.at(1, "must be empty")


# ----------------------------------------------------------------------------------------------- limits


def functions(source: Source) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
    """Every function with the class whose method it is, nested ones included."""
    for node in ast.walk(source.tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child, node if isinstance(node, ast.ClassDef) else None


def file_length(source: Source) -> Iterator[str]:
    limit = KERNEL_FILE_LINES if source.is_kernel else FILE_LINES
    if (lines := len(source.text.splitlines())) > limit:
        yield source.at(lines, f"{lines} lines, at most {limit}")


def function_length(source: Source) -> Iterator[str]:
    for function, owner in functions(source):
        limit = KERNEL_METHOD_LINES if source.is_kernel and owner else FUNCTION_LINES
        if (lines := (function.end_lineno or function.lineno) - function.lineno + 1) > limit:
            yield source.at(function.lineno, f"{function.name} has {lines} lines, at most {limit}")


def parameter_count(source: Source) -> Iterator[str]:
    """At most 8 parameters; module constructors, operator schemas and autograd.Function methods are excepted."""
    for function, owner in functions(source):
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
        if owner and names[:1] in (["self"], ["cls"]):
            names = names[1:]
        if len(names) > PARAMETERS and not _has_free_signature(source, function, owner):
            yield source.at(function.lineno, f"{function.name} has {len(names)} parameters, at most {PARAMETERS}")


def _has_free_signature(
    source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None
) -> bool:
    if source.unit == "modules":
        return owner is not None and function.name == "__init__"
    if source.unit == "ops":
        decorators = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
        names = {ast.unparse(d).rpartition(".")[2] for d in decorators}
        if any(name in SCHEMA_DECORATORS or name.startswith("register_") for name in names):
            return True
    bases = {ast.unparse(base).rpartition(".")[2] for base in owner.bases} if owner else set()
    return source.unit is not None and "Function" in bases and function.name in AUTOGRAD_METHODS


# -------------------------------------------------------------------------------------------- statements


def no_assert(source: Source) -> Iterator[str]:
    """`python -O` drops asserts: the library raises instead."""
    for node in ast.walk(source.tree) if source.unit else ():
        if isinstance(node, ast.Assert):
            yield source.at(node.lineno, "assert in the library; raise an error that names the argument")


def no_literal_tolerance(source: Source) -> Iterator[str]:
    """Tolerances come from `pma.testing`. Zero is no tolerance: it asks for equality."""
    if source.path.parts[0] != "tests":
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        is_approx = ast.unparse(node.func).rpartition(".")[2] == "approx"
        for keyword in node.keywords:
            is_tolerance = keyword.arg in {"atol", "rtol"} or (is_approx and keyword.arg in {"abs", "rel"})
            if is_tolerance and _is_number(keyword.value) and ast.unparse(keyword.value) not in {"0", "0.0"}:
                yield source.at(keyword.value.lineno, f"literal {keyword.arg}; take it from pma.testing")


def _is_number(node: ast.expr) -> bool:
    """Whether an expression is made of numbers alone, like 1e-3 or 2 * 2**-8."""
    parts = [n for n in ast.walk(node) if isinstance(n, ast.expr)]
    return all(
        isinstance(n, ast.BinOp | ast.UnaryOp) or (isinstance(n, ast.Constant) and isinstance(n.value, int | float))
        for n in parts
    )


RULES: tuple[Rule, ...] = (
    import_arrows,
    lazy_imports,
    heavy_imports,
    empty_kernels_package,
    file_length,
    function_length,
    parameter_count,
    no_assert,
    no_literal_tolerance,
)


# --------------------------------------------------------------------------------- names and documents


def name_violations(paths: Iterable[PurePosixPath]) -> Iterator[str]:
    """No vague names, and no two siblings whose names differ by one trailing letter or underscore."""
    siblings: dict[PurePosixPath, set[str]] = {}
    for path in paths:
        for entry in (path, *path.parents[:-1]):
            siblings.setdefault(entry.parent, set()).add(entry.stem)
    for folder, stems in sorted(siblings.items()):
        yield from (f"{folder / stem}: a name that says nothing" for stem in sorted(stems & VAGUE_NAMES))
        for stem in sorted(stems):
            if (stem[-1].isalpha() or stem[-1] == "_") and stem[:-1] in stems:
                yield f"{folder / stem}: too close to its sibling {stem[:-1]}"


def document_violations(name: str, text: str, paths: Collection[PurePosixPath]) -> Iterator[str]:
    """Every path in backticks exists. Fenced blocks are left alone; `*` may stand for any names."""
    for line, quoted in _quoted(text):
        for word in quoted.split():
            word = re.sub(r":\d+$", "", word).rstrip("/")
            if _looks_like_path(word) and not any(_matches(path, word) for path in paths):
                yield f"{name}:{line}: {word} does not exist"


def _quoted(text: str) -> Iterator[tuple[int, str]]:
    is_fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        is_fenced ^= line.lstrip().startswith("```")
        if not is_fenced:
            yield from ((number, quoted) for quoted in re.findall(r"`([^`]+)`", line))


def _looks_like_path(word: str) -> bool:
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*", word):
        return False
    path = PurePosixPath(word)
    if "/" in word:
        return path.parts[0] in DOCUMENT_FOLDERS
    return path.suffix in DOCUMENT_SUFFIXES and path.stem != ""


def _matches(path: PurePosixPath, word: str) -> bool:
    """Whether the path or a folder above it is the word; a bare file name may lie in any folder."""
    if "/" not in word:
        return path.match(word)
    return any(len(entry.parts) == word.count("/") + 1 and entry.match(word) for entry in (path, *path.parents))


# ------------------------------------------------------------------------------------------- at run time


def heavy_modules_after(statement: str, heavy: Collection[str] = HEAVY_MODULES) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after running a statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(heavy) & set(result.stdout.split())
