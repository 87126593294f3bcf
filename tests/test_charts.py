"""Charts of kept results: the newest of each variant, ours and theirs told apart, what cannot be drawn refused."""

import json
from pathlib import Path

import pytest

from benchmarks.charts import draw, is_ours, label, newest
from benchmarks.record import RESULTS

PNG = b"\x89PNG"


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_last_result_of_a_variant_counts(tmp_path):
    old, new = ({"problem": "a", "variant": "pma", "ms": ms, "device": "one"} for ms in (2.0, 1.0))
    other = {"problem": "b", "variant": "peer", "ms": 3.0, "device": "one"}
    path = write(tmp_path / "x.jsonl", old, other, new, {"unit": "dB"})
    assert newest(path) == {"a": [new], "b": [other]}


def test_whose_a_kernel_is():
    assert is_ours({"variant": "cluster", "times peer": 1.4})
    assert not is_ours({"variant": "FlashAttention-4, bf16", "times peer": 1.0})
    assert is_ours({"variant": "pma, transposed"}) and not is_ours({"variant": "torch.compile of both"})


def test_labels():
    assert label({"ms": 40.42, "times peer": 1.405}) == "40.4 ms, 1.41x"
    assert label({"ms": 1.18, "share of copy": 0.918}) == "1.18 ms, 92% of copy"
    assert label({"ms": 0.5}) == "0.5 ms"


@pytest.mark.parametrize("name", ["module", "norm_quantize"])
def test_kept_results_are_drawn(tmp_path, name):
    draw(RESULTS / f"{name}.jsonl", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG)


def test_results_without_variants_are_refused(tmp_path):
    with pytest.raises(ValueError, match="numerics.jsonl compares no variants: rows need a problem, a variant and ms"):
        draw(RESULTS / "numerics.jsonl", tmp_path / "picture.png")
