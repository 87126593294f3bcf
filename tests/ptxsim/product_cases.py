"""wgmma on operands that show how a tensor core sums, and what an H200 made of them (hopper_products.npz).

python tests/ptxsim/product_cases.py FILE.npz      # on a Hopper GPU: writes that file
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import wgmma_kernels
from wgmma_kernels import Form

FORMS = (
    *(Form(kind, number, k_steps=1) for number in ("f32", "f16") for kind in ("e4m3", "e5m2", "f16")),
    Form("bf16", k_steps=1), Form("tf32", k_steps=1), Form("e4m3"), Form("bf16"),
)  # fmt: skip
KEPT = slice(None, None, 8)  # threads whose results the file holds
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
EXPONENTS = {"e4m3": 7, "e5m2": 12, "f16": 12, "bf16": 40, "tf32": 40}  # operands reach from 2^−e to 2^e
LAUNCH = {"block": (128, 1, 1), "shared_bytes": wgmma_kernels.STAGE_BYTES}


def _wide(rng: np.random.Generator, form: Form, shape: tuple[int, int]) -> np.ndarray:
    most = EXPONENTS[form.kind] if form.number == "f32" else 4
    return np.exp2(rng.integers(-most, most + 1, shape)).astype(np.float32)


def _special(rng: np.random.Generator, form: Form, x: np.ndarray) -> np.ndarray:
    place = rng.random(x.shape)
    return np.where(place < 0.01, np.nan, np.where(place > 0.995, 448 if form.kind == "e4m3" else np.inf, x))


# What becomes of standard-normal operands.
OPERANDS: dict[str, Callable[[np.random.Generator, Form, np.ndarray], np.ndarray]] = {
    "normal": lambda rng, form, x: x,
    "wide": lambda rng, form, x: x * _wide(rng, form, x.shape),
    "positive": lambda rng, form, x: abs(x),
    "sparse": lambda rng, form, x: x * _wide(rng, form, x.shape) * (rng.random(x.shape) < 0.25),
    "one term": lambda rng, form, x: x * _wide(rng, form, (len(x), 1)) * (np.arange(x.shape[1]) == 0),
    "special": _special,
}


def inputs(form: Form, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Shared memory with A and B, and accumulators uint32 [128 threads, registers]."""
    rng = np.random.default_rng(list(OPERANDS).index(name))
    k = form.k_steps * wgmma_kernels.STEP // wgmma_kernels.ELEMENT_BYTES[form.kind]
    a, b = (OPERANDS[name](rng, form, rng.standard_normal((64, k)).astype(np.float32)) for _ in range(2))
    if form.kind in LARGEST:
        a, b = (np.where(np.isinf(x), x, x.clip(-LARGEST[form.kind], LARGEST[form.kind])) for x in (a, b))
    count = form.d_registers * (1 if form.number == "f32" else 2)
    d = rng.standard_normal((128, count)) * (np.exp2(rng.integers(-12, 13, (128, count))) if count == 32 else 1.0)
    d = d.astype(np.float32 if form.number == "f32" else np.float16)
    if name == "special":
        d[0, 0], d[8, 1], d[16, 2] = np.nan, np.inf, -np.inf
    return wgmma_kernels.stage(a.astype(np.float32), b.astype(np.float32), form.kind), d.view(np.uint32)


def kernel(form: Form) -> str:
    """Accumulators come from p2 and go there."""
    place = f"mul.wide.u32 %rd7, %r1, {4 * form.d_registers}; add.s64 %rd7, %rd3, %rd7;"
    loads = [f"ld.global.b32 %r{100 + i}, [%rd7+{4 * i}];" for i in range(form.d_registers)]
    products = [wgmma_kernels.multiply(form, step, True) for step in range(form.k_steps)]
    return "\n".join(
        [
            wgmma_kernels.setup(form), place, *loads, "fence.proxy.async.shared::cta;", "bar.sync 0;",
            "wgmma.fence.sync.aligned;", *products, "wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 0;", wgmma_kernels.finish(form),
        ]
    )  # fmt: skip


def results(form: Form, name: str, run: Callable[..., Any]) -> np.ndarray:
    """D of the threads kept, as numbers. run: `ptx_kernels.run` or `cuda_driver.run`."""
    memory, d = inputs(form, name)
    run(kernel(form), memory, np.zeros((128, 4, 4), np.uint32), d, **LAUNCH)
    return np.ascontiguousarray(d[KEPT]).view(np.float32 if form.number == "f32" else np.float16)


def main() -> None:
    import cuda_driver

    found = {f"{i} {name}": results(form, name, cuda_driver.run) for i, form in enumerate(FORMS) for name in OPERANDS}
    np.savez_compressed(sys.argv[1], **found)


if __name__ == "__main__":
    main()
