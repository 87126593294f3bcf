"""Every example runs as a user would start it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["examples/minimal.py"], "empty segment is zero: True"),
        (["examples/swap_in.py"], "AttentionPoolingModel"),
        (["examples/train_movielens.py", "--quick", "--output-dir", "{out}"], "restored with the same test metrics"),
    ],
    ids=lambda v: Path(v[0]).stem if isinstance(v, list) else "",
)
def test_example_runs(arguments, expected, tmp_path):
    pytest.importorskip("torchrec")
    command = [sys.executable, *(a.format(out=tmp_path) for a in arguments)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert expected in run.stdout
    if "--output-dir" in arguments:
        assert {p.name for p in tmp_path.iterdir()} == {"movielens.png", "movielens.pt"}
