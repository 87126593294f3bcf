"""Speed of `ptxsim` in warp instructions a second, with and without checks.

    python -m benchmarks.simulator [--repeats 5] [--save]

Kernels of quack and FlashAttention-4, run in the simulator of the working tree, one process, one thread. Each row is
the median of the repeats; their spread says how quiet the machine was. Compilation is not counted.
"""

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import ptxsim
from benchmarks import record

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "ptxsim"))


def flash_forward(**options) -> ptxsim.simulate:
    """FA4 on sm_100a, 1 head of 128, 512 queries and keys, not causal."""
    interface = importlib.import_module("flash_attn.cute.interface")
    q, k, v = (torch.randn(1, 512, 1, 128).bfloat16() for _ in range(3))
    with ptxsim.simulate("sm_100a", 148, **options) as simulation:
        interface._flash_attn_fwd(q, k, v, return_lse=True)
    return simulation


def mxfp8_gemm(**options) -> ptxsim.simulate:
    """quack, 256 x 256 x 1,024, tile 128 x 128, 1 CTA."""
    return importlib.import_module("quack_cases").mxfp8_gemm(256, 256, 1024, arch="sm_100a", num_sms=148, **options)


def mxfp8_gemm_pair(**options) -> ptxsim.simulate:
    """quack, 512 x 256 x 1,024, tile 256 x 256, 2 CTAs."""
    cases = importlib.import_module("quack_cases")
    return cases.mxfp8_gemm(512, 256, 1024, (256, 256), (2, 1), arch="sm_100a", num_sms=148, **options)


def bf16_gemm(**options) -> ptxsim.simulate:
    """quack, 256 x 256 x 1,024, tile 128 x 128, 1 CTA."""
    cases = importlib.import_module("quack_cases")
    return cases.bf16_gemm(256, 256, 1024, (128, 128), (1, 1), arch="sm_100a", num_sms=148, **options)


CASES: tuple[Callable[..., ptxsim.simulate], ...] = (flash_forward, mxfp8_gemm, mxfp8_gemm_pair, bf16_gemm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/simulator.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        for checks in (False, True):
            launches = [case(seed=seed, checks=checks).launches[-1] for seed in range(arguments.repeats + 1)][1:]
            speeds = sorted(launch.executed / launch.seconds for launch in launches)
            rows.append(
                {
                    "case": case.__name__, "checks": checks, "instructions": launches[0].executed,
                    "median": round(statistics.median(speeds)), "least": round(speeds[0]), "most": round(speeds[-1]),
                }
            )  # fmt: skip
            print("{case:16} checks {checks!s:5} {instructions:8,} instructions  {median:9,} /s "
                  "({least:,} to {most:,})".format(**rows[-1]), flush=True)  # fmt: skip
    if arguments.save:
        print(record.append("simulator", rows))


if __name__ == "__main__":
    main()
