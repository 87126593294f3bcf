"""Which implementation serves an operator: a kernel for the device, else the PyTorch reference.

    backend        serves                                                     raises
    "auto"         kernels where they exist, else the reference               never
    "reference"    the reference                                              never
    "sm90"         nothing yet: it needs a kernel for every operator          at construction
    "sm100"        the whole module on kernels, see `sm100.py`                at construction and when called

An implementation changes no rounding point: kernels and reference round at the same places.
"""

import functools
import importlib.util
from typing import Any

import torch

from pma.checks import UnsupportedError, check_choice
from pma.kernels.device_facts import SM100, SM103, device_facts
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec
from pma.kernels.scatter_scales.spec import ScatterScalesSpec
from pma.ops.sm100 import PoolShape, specs_of

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
        ValueError: not one of BACKENDS.    UnsupportedError: "sm90", which lacks kernels for some operators; "sm100"
        without a Blackwell GPU.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "sm90":
        raise UnsupportedError(
            f"backend='sm90' lacks kernels for some operators in this version, got device capability {_capability()}; "
            "use backend='auto' or 'reference'"
        )
    if backend == "sm100" and not (torch.cuda.is_available() and is_blackwell(torch.device("cuda"))):
        raise UnsupportedError(f"backend='sm100' needs device capability sm_100 or sm_103, got {_capability()}")


def is_blackwell(device: torch.device) -> bool:
    """Whether the kernels for Blackwell run there."""
    return device_facts(device) in (SM100, SM103)


@torch.compiler.assume_constant_result
def uses_sm100(backend: str, device: torch.device, numerics: str, *shape: Any) -> bool:
    """Whether the whole module runs on kernels for Blackwell. numerics: a record's token; shape: fields of `PoolShape`,
    one by one, since Dynamo takes no named tuple for a constant.

    Raises:
        UnsupportedError: backend="sm100" cannot serve this device or these sizes; the message says why.
    """
    if backend not in ("auto", "sm100"):
        return False
    if backend == "auto" and not is_blackwell(device):
        return False
    reason = why_not_sm100(device, PoolShape(*shape), numerics)
    if reason and backend == "sm100":
        raise UnsupportedError(f"backend='sm100' cannot serve this call: {reason}; use backend='auto'")
    return reason is None


def why_not_sm100(device: torch.device, shape: PoolShape, numerics: str) -> str | None:
    """Why the kernels for Blackwell do not serve a module, None if they do."""
    if not is_blackwell(device):
        return f"it needs device capability sm_100 or sm_103, got {_capability(device)}"
    if reason := _why_no_kernels(device):
        return reason
    reasons = ((name, spec.why_unsupported()) for name, spec in specs_of(shape, numerics)._asdict().items())
    return next((f"{name}: {reason}" for name, reason in reasons if reason), None)


def uses_kernel(backend: str, device: torch.device, spec: Spec) -> bool:
    """Whether a kernel serves the call that `spec` describes."""
    return why_reference(backend, device, spec) is None


def why_reference(backend: str, device: torch.device, spec: Spec) -> str | None:
    """Why the reference serves the call, None if a kernel does."""
    if backend == "reference":
        return "requested"
    return _why_no_kernels(device) or spec.why_unsupported()


def report(backend: str, device: torch.device, shape: PoolShape, numerics: str) -> dict[str, str]:
    """Operator → implementation and why, for `PMA.backend_report()`."""
    if backend != "reference" and (why_not := why_not_sm100(device, shape, numerics)) is None:
        return dict.fromkeys(OPERATORS, _kernel(device))
    embed_dim, dtype, offsets = shape.embed_dim, shape.events, shape.offsets
    head_dim = embed_dim // shape.num_heads
    specs: dict[str, Spec] = {
        "rmsnorm_quantize": QuantizeSpec(embed_dim, dtype, offsets, weight_dtype=dtype),
        "quantize": QuantizeSpec(embed_dim, dtype, offsets, delta_columns=head_dim, out_dtype=dtype),
        "scatter_scales": ScatterScalesSpec(embed_dim, offsets, "row"),
        "rmsnorm_backward": RMSNormBackwardSpec(embed_dim, dtype, dtype, dtype, offsets, adds_dv=True),
    }
    reasons = {name: why_reference(backend, device, spec) for name, spec in specs.items()}
    others = "no kernel in this version"
    if backend == "reference":
        others = "requested"
    elif is_blackwell(device):
        others = str(why_not)
    return {
        name: f"reference ({reason})" if (reason := reasons.get(name, others)) else _kernel(device)
        for name in OPERATORS
    }


@functools.cache
def _why_no_kernels(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"no kernels for {device.type} devices"
    if device_facts(device) is None:
        return f"no kernels for {_capability(device)}"
    missing = [name for name in ("cutlass", "quack") if importlib.util.find_spec(name) is None]
    return f"the packages of the extra `kernels` are missing: {', '.join(missing)}" if missing else None


def _kernel(device: torch.device) -> str:
    facts = device_facts(device)
    return f"kernel ({facts.arch})" if facts else ""


def _capability(device: torch.device | None = None) -> str:
    if not torch.cuda.is_available():
        return "none (no CUDA device)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
