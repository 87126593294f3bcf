"""Which implementation serves an operator: a kernel for the device, else the PyTorch reference.

    backend        serves                                                     raises
    "auto"         kernels where they exist, else the reference               never
    "reference"    the reference                                              never
    "sm90"         nothing yet: it needs a kernel for every operator          at construction
    "sm100"        likewise                                                   at construction

An implementation changes no rounding point: kernels and reference round at the same places.
"""

import functools
import importlib.util

import torch

from pma.checks import UnsupportedError, check_choice
from pma.kernels.device_facts import device_facts
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec
from pma.kernels.scatter_scales.spec import ScatterScalesSpec

BACKENDS = ("auto", "reference", "sm90", "sm100")
OPERATORS = (
    "rmsnorm_quantize",
    "quantize",
    "scatter_scales",
    "gemm_quantize",
    "attention_forward",
    "attention_backward",
    "gemm",
    "weight_grad",
    "rmsnorm_backward",
)
Spec = QuantizeSpec | ScatterScalesSpec | RMSNormBackwardSpec


def check_backend(backend: str) -> None:
    """Raise unless `backend` names one that this version can serve.

    Raises:
        ValueError: not one of BACKENDS.    UnsupportedError: "sm90" or "sm100", which lack kernels for some operators.
    """
    check_choice("backend", backend, BACKENDS)
    if backend in ("sm90", "sm100"):
        raise UnsupportedError(
            f"backend={backend!r} lacks kernels for some operators in this version, got device capability "
            f"{_capability()}; use backend='auto' or 'reference'"
        )


def uses_kernel(backend: str, device: torch.device, spec: Spec) -> bool:
    """Whether a kernel serves the call that `spec` describes."""
    return why_reference(backend, device, spec) is None


def why_reference(backend: str, device: torch.device, spec: Spec) -> str | None:
    """Why the reference serves the call, None if a kernel does."""
    if backend == "reference":
        return "requested"
    return _why_no_kernels(device) or spec.why_unsupported()


def report(backend: str, device: torch.device, dtype: torch.dtype, embed_dim: int, num_heads: int) -> dict[str, str]:
    """Operator → implementation and why, for `PMA.backend_report()`; events in the dtype of the parameters."""
    offsets, head_dim = torch.int64, embed_dim // num_heads
    specs: dict[str, Spec] = {
        "rmsnorm_quantize": QuantizeSpec(embed_dim, dtype, offsets, weight_dtype=dtype),
        "quantize": QuantizeSpec(embed_dim, dtype, offsets, delta_columns=head_dim, out_dtype=dtype),
        "scatter_scales": ScatterScalesSpec(embed_dim, offsets, "row"),
        "rmsnorm_backward": RMSNormBackwardSpec(embed_dim, dtype, dtype, dtype, offsets, adds_dv=True),
    }
    reasons = {name: why_reference(backend, device, spec) for name, spec in specs.items()}
    others = (
        why_reference(backend, device, specs["quantize"]) if backend == "reference" else "no kernel in this version"
    )
    facts = device_facts(device)
    kernel = f"kernel ({facts.arch})" if facts else ""
    return {name: f"reference ({reason})" if (reason := reasons.get(name, others)) else kernel for name in OPERATORS}


@functools.cache
def _why_no_kernels(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"no kernels for {device.type} devices"
    if device_facts(device) is None:
        return f"no kernels for {_capability(device)}"
    missing = [name for name in ("cutlass", "quack") if importlib.util.find_spec(name) is None]
    return f"the packages of the extra `kernels` are missing: {', '.join(missing)}" if missing else None


def _capability(device: torch.device | None = None) -> str:
    if not torch.cuda.is_available():
        return "none (no CUDA device)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
