"""What the benchmarks of Hopper's projections and weight gradient share: shapes, operands, the table they print."""

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.timing import side_by_side
from pma.layouts import MXFP8Tensor, quantize

SEGMENTS = 768
SHAPES = ((384, 128), (512, 64))  # width of the model, of a head
ROWS = (1_580_000, 5_860_000)
CALLS = 4


class Shape(NamedTuple):
    rows: int
    columns: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.rows:,} x {self.columns}, heads of {self.head_dim}, {SEGMENTS} segments"


def parse_shapes(description: str | None) -> list[Shape]:
    """From the command line; without arguments all."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--columns", type=int, nargs="+", default=[columns for columns, _ in SHAPES])
    arguments = parser.parse_args()
    heads = dict(SHAPES)
    return [Shape(rows // 32 * 32, n, heads.get(n, 128)) for n in arguments.columns for rows in arguments.rows]


def jagged_offsets(rows: int) -> Tensor:
    """Segments cut at random rows. → [B + 1] int64 on the GPU"""
    cuts = torch.randint(0, rows + 1, (SEGMENTS - 1,), generator=torch.Generator().manual_seed(0)).sort().values
    return torch.cat([torch.tensor([0]), cuts, torch.tensor([rows])]).cuda()


def jagged_matrix(shape: Shape, offsets: Tensor, seed: int) -> tuple[MXFP8Tensor, Tensor]:
    """Standard-normal rows, quantised with one scale for a head, and in bf16."""
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(shape.rows, shape.columns, dtype=torch.bfloat16, device="cuda", generator=generator)
    return quantize(values, offsets, columns_per_scale=shape.head_dim), values


def compare(name: str, problem: str, variants: dict, *, flops: float, num_bytes: float) -> None:
    """Time the variants beside a device copy, print a table, append it to results/<name>.jsonl.

    flops, num_bytes: of the problem, the least that must be done and moved, whatever a variant does. The first is ours.
    """
    copy_from = torch.randn(4_000_000, 384, dtype=torch.bfloat16, device="cuda")
    copy_to = torch.empty_like(copy_from)
    times = side_by_side({"device copy": lambda: copy_to.copy_(copy_from)} | variants, calls=CALLS)
    copied = 2 * copy_from.nbytes / times.pop("device copy") / 1e9
    ours, rows = next(iter(times.values())), []
    print(f"{name}, {problem}: {num_bytes / 1e6:,.0f} MB must move; device copy {copied:.2f} TB/s", flush=True)
    for variant, milliseconds in times.items():
        speed, bandwidth = flops / milliseconds / 1e9, num_bytes / milliseconds / 1e9
        print(
            f"    {variant:40}{milliseconds:9.3f} ms{speed:8.0f} TFLOP/s{bandwidth / copied:8.1%} of copy"
            f"{milliseconds / ours:7.2f}x",
            flush=True,
        )
        rows.append(
            {
                "problem": problem, "variant": variant, "ms": round(milliseconds, 4), "TFLOP/s": round(speed, 1),
                "share of copy": round(bandwidth / copied, 4), "times ours": round(milliseconds / ours, 3),
                "copy TB/s": round(copied, 3), "protocol": "CUDA graphs, interleaved, median of 15",
            }
        )  # fmt: skip
    record.append(name, rows)
