"""Compiles a C source into a shared object, once for each source, compiler and set of flags.

The result lies in the cache folder under a name that holds the hash of everything that decides it, and gets there by
an atomic rename: processes that start together may each compile it, and each finds a complete file.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
BASE_FLAGS = ("-O2", "-fPIC", "-shared")


class CompilerMissing(RuntimeError):
    """No C compiler on this machine."""


class CompilationFailed(RuntimeError):
    """The C compiler refused a source; the message holds what it said."""


def cache_folder() -> Path:
    """$PTXSIM_CACHE, else `ptxsim-<uid>` in the user's cache folder, else in the folder for temporary files.

    Created if absent, for this user alone: shared objects from here are loaded into the process.
    """
    chosen = os.environ.get("PTXSIM_CACHE")
    if chosen:
        folder = Path(chosen)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    name = f"ptxsim-{os.getuid()}"
    home_cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    for parent in (home_cache, Path(tempfile.gettempdir())):
        folder = parent / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise OSError(f"neither {home_cache} nor {tempfile.gettempdir()} can be written; set PTXSIM_CACHE to a folder")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that other processes see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def find_compiler() -> str:
    """The C compiler's path: $CC if set, else the first of cc, gcc, clang.

    Raises:
        CompilerMissing: there is none, or $CC names none.
    """
    chosen = os.environ.get("CC")
    candidates = (chosen,) if chosen else COMPILERS
    for candidate in candidates:
        if found := shutil.which(candidate):
            return found
    tried = f"CC={chosen}" if chosen else ", ".join(COMPILERS)
    raise CompilerMissing(
        f"ptxsim needs a C compiler and found none (tried {tried}); "
        "install gcc or clang (Debian: apt-get install gcc libc6-dev) or set CC to one"
    )


def build_shared_object(source: str, name: str, flags: Sequence[str] = ()) -> Path:
    """Compile C source text into a shared object and return its path, `<cache>/<name>-<hash>/lib<name>.so`.

    `flags` follow -O2 -fPIC -shared and so may override the level of optimisation.

    Raises:
        CompilerMissing: no C compiler.
        CompilationFailed: the compiler's message.
    """
    compiler = find_compiler()
    command = (*BASE_FLAGS, *flags)
    parts = (source, _compiler_version(compiler), *command)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_folder() / f"{name}-{digest}" / f"lib{name}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(prefix="ptxsim-build-") as scratch:
        source_path, object_path = Path(scratch, f"{name}.c"), Path(scratch, f"lib{name}.so")
        source_path.write_text(source)
        line = [compiler, *command, "-o", str(object_path), str(source_path), "-lm"]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            raise CompilationFailed(f"{' '.join(line)} failed with status {done.returncode}:\n{done.stderr.strip()}")
        write_atomically(target, object_path.read_bytes())
    return target


@functools.cache
def _compiler_version(compiler: str) -> str:
    """Path and first line of --version: another compiler makes another file."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    return f"{compiler} {done.stdout.partition(chr(10))[0]}"
