"""Our Blackwell kernels get no slower: cycles of a steady step, replayed, beside those recorded in step_cycles.json.

Where longer is meant, `PYTHONPATH=. python tests/ptxsim/test_step_cycles.py` writes the file anew.
"""

from pathlib import Path

import pytest

from ptxsim.timeline import command, machine_code, regression
from ptxsim.timeline.parameters import load_chip
from ptxsim.timeline.trace import Trace

pytestmark = [pytest.mark.ptxsim]
FOLDER = Path(__file__).parent
FIGURES = FOLDER / "step_cycles.json"
CASES = ("attention_forward_mxfp8", "gemm_quantize_384", "weight_grad_384")
CHIPS = ("b200", "gb300")
USUAL = {("attention_forward_mxfp8", "b200"), ("attention_forward_mxfp8", "gb300")}
USUAL |= {("gemm_quantize_384", "b200"), ("weight_grad_384", "b200")}  # whose code is the same on both
RUNS = [
    pytest.param(case, chip, marks=() if (case, chip) in USUAL else pytest.mark.full)
    for case in CASES
    for chip in CHIPS
]


def trace(case: str, chip: str) -> Trace:
    return command.capture(f"{FOLDER / 'timeline_cases.py'}:{case}", load_chip(chip))


@pytest.mark.parametrize(("case", "chip"), RUNS)
def test_a_step_takes_no_longer_than_recorded(case, chip):
    try:
        machine_code.find_assembler()
        machine_code.find_disassembler()
    except machine_code.ToolMissing as error:
        pytest.skip(str(error))
    regression.check(case, trace(case, chip), chip, FIGURES)


if __name__ == "__main__":
    for each in CASES:
        for name in CHIPS:
            print(each, name, round(regression.record(each, trace(each, name), name, FIGURES)))
