"""SQNR of mxfp8 against bf16 and fp32 for every named tensor, beside the source's figures and the frozen floors.

    python -m benchmarks.numerics [--segments 4] [--max-length 2048] [--gain 1.0] [--dout normal] [--device cuda]
        [--backend sm90]

Problem: E = 384, H = 3, S = 512, lengths uniform in 0 … max-length, standard-normal events, seeds and output gradient,
projections of std gain/√E (`pma.testing`). The source reports SQNR against its bf16 result on an unknown distribution
at B = 768, 5,856,019 events. mxfp8 is the reference's, with --backend that of kernels under their record of numerics.
"""

import argparse
from dataclasses import replace

import torch

from benchmarks import record
from pma import AttentionNumerics
from pma.numerics import HOPPER_NUMERICS
from pma.testing import SQNR_FLOORS, make_jagged, make_pma, run_with_gradients, sqnr_db, uneven_lengths

SOURCE = {
    "forward_output": (18.84, 18.84),
    "event_embs.grad": (26.55, 26.55),
    "seed_embs.grad": (27.68, 25.65),
    "query_norm.weight.grad": (28.02, 26.02),
    "query_proj.weight.grad": (27.69, 25.66),
    "key_proj.weight.grad": (25.15, 25.15),
}


RECORDS = {"reference": AttentionNumerics(), "sm90": HOPPER_NUMERICS, "sm100": AttentionNumerics()}


def measure(
    segments: int = 4, max_length: int = 2048, gain: float = 1.0, dout: str = "normal", device: str = "cpu",
    backend: str = "reference",
) -> dict[str, dict[str, float]]:  # fmt: skip
    """SQNR in dB: tensor name → {"fp32 dQ vs fp32", "fp32 dQ vs bf16", "fp16 dQ vs fp32", "fp16 dQ vs bf16"}."""
    events, offsets = make_jagged(uneven_lengths(segments, max_length), 384, dtype=torch.bfloat16)
    events, offsets = events.to(device), offsets.to(device)

    def run(precision: str, dtype: torch.dtype = torch.bfloat16, **options):
        sizes = {"embed_dim": 384, "num_heads": 3, "num_seeds": 512}
        module = make_pma(projection_gain=gain, precision=precision, **sizes, **options)
        return run_with_gradients(module.to(device), events.to(dtype), offsets, dout=dout)

    references = {"fp32": run("fp32", dtype=torch.float32), "bf16": run("bf16")}
    results: dict[str, dict[str, float]] = {}
    for accumulation in ("fp32", "fp16"):
        numerics = replace(RECORDS[backend], dq_accumulation=accumulation)
        actual = run("mxfp8", numerics=numerics, backend=backend)
        for against, expected in references.items():
            for name, value in actual.items():
                results.setdefault(name, {})[f"{accumulation} dQ vs {against}"] = sqnr_db(value, expected[name])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--gain", type=float, default=1.0, help="projection std times √E")
    parser.add_argument("--dout", choices=["normal", "ones"], default="normal", help="output gradient")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=list(RECORDS), default="reference", help="of mxfp8")
    arguments = parser.parse_args()
    results = measure(**vars(arguments))
    columns = ["fp32 dQ vs fp32", "fp32 dQ vs bf16", "fp16 dQ vs fp32", "fp16 dQ vs bf16"]
    print(f"SQNR in dB: {arguments}")
    print(f"{'':26}" + "".join(f"{c:>17}" for c in columns) + f"{'source fp32/fp16':>19}{'floor fp32/fp16':>18}")
    for name, row in results.items():
        source = "{:.2f} / {:.2f}".format(*SOURCE[name]) if name in SOURCE else "-"
        floor = "{:.1f} / {:.1f}".format(*SQNR_FLOORS[name]) if name in SQNR_FLOORS else "-"
        print(f"{name:26}" + "".join(f"{row[c]:17.2f}" for c in columns) + f"{source:>19}{floor:>18}")
    rows = [{"tensor": name, "unit": "dB", **vars(arguments), **row} for name, row in results.items()]
    print("kept in", record.append("numerics", rows))


if __name__ == "__main__":
    main()
