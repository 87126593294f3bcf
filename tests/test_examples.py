"""Every example runs as a user would start it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUICK = ["--quick", "--output-dir", "{out}"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
DISTRIBUTED = ["examples/train_distributed.py", "--no-compile", *QUICK]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["examples/minimal.py"], "empty segment is zero: True"),
        (["examples/swap_in.py"], "AttentionPoolingModel"),
        (["examples/train_movielens.py", *QUICK], "restored with the same test metrics"),
    ],
    ids=lambda v: Path(v[0]).stem if isinstance(v, list) else "",
)
def test_example_runs(arguments, expected, tmp_path):
    pytest.importorskip("torchrec")
    assert expected in output_of(arguments, tmp_path)
    if "--output-dir" in arguments:
        assert {p.name for p in tmp_path.iterdir()} == {"movielens.png", "movielens.pt"}


def test_distributed_example_trains_on_two_ranks_and_goes_on_with_one(tmp_path):
    pytest.importorskip("torchrec")
    assert "2 ranks, dmp" in output_of([*TORCHRUN, "2", *DISTRIBUTED, "--epochs", "1"], tmp_path)
    resumed = output_of([*TORCHRUN, "1", *DISTRIBUTED, "--epochs", "2", "--resume", "{out}/checkpoint-1"], tmp_path)
    assert "epoch 1" not in resumed and "epoch 2" in resumed and "1 ranks, dmp" in resumed


def output_of(arguments, folder):
    command = [sys.executable, *(argument.format(out=folder) for argument in arguments)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout
