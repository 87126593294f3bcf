"""Which core of the SIMT core's cache a program gets, and when one is built."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ptxsim.core import binding
from ptxsim.core.binding import load_core
from ptxsim.host.build import CompilationFailed

pytestmark = pytest.mark.ptxsim


@pytest.fixture
def restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """An empty cache folder; the function it gives forgets the loaded cores, as a new process would."""
    monkeypatch.setenv("PTXSIM_CACHE", str(tmp_path))

    def restart() -> None:
        monkeypatch.setattr(binding, "_loaded", [])

    restart()
    return restart


def test_a_core_is_built_only_for_expressions_that_none_has(restarted: Callable[[], None], tmp_path: Path) -> None:
    def num_built() -> int:
        return len(list(tmp_path.glob("simt-*")))

    small = load_core(["a + b"])
    with pytest.raises(CompilationFailed, match="libsimt"):
        load_core(["a - b", "(a"])
    assert load_core(["a + b"]) is small and num_built() == 1

    restarted()
    large = load_core(["a - b"])
    assert set(large.opcodes) == {"a + b", "a - b"} and num_built() == 2
    assert load_core(["a + b"]) is large  # a loaded one will do

    restarted()
    assert set(load_core(["a + b"]).opcodes) == {"a + b"}  # what others have built since changes nothing
    assert set(load_core(["a - b"]).opcodes) == {"a + b", "a - b"} and num_built() == 2
