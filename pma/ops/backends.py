"""Which implementation serves an operator: a kernel for the device, else the PyTorch reference.

    backend        serves                                                     raises
    "auto"         kernels where they exist, else the reference               never
    "reference"    the reference                                              never
    "sm90"         the whole module on kernels for Hopper, see `sm90.py`      at construction and when called
    "sm100"        the same for Blackwell, see `sm100.py`                     at construction and when called

An implementation changes no rounding point: kernels and reference round at the same places.
"""

import functools
import importlib.util
from typing import Any

import torch

from pma.checks import UnsupportedError, check_choice
from pma.kernels.device_facts import SM90, SM100, SM103, device_facts
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec
from pma.kernels.scatter_scales.spec import ScatterScalesSpec
from pma.ops import sm90, sm100
from pma.ops.pool import PoolShape

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
MODULES: dict[str, Any] = {"sm90": sm90, "sm100": sm100}
NEEDS = {"sm90": "sm_90", "sm100": "sm_100 or sm_103"}
FAMILIES = {SM90: "sm90", SM100: "sm100", SM103: "sm100"}


def check_backend(backend: str) -> None:
    """Raise unless `backend` names one that this version can serve.

    Raises:
        ValueError: not one of BACKENDS.    UnsupportedError: "sm90" without a Hopper GPU, "sm100" without a Blackwell.
    """
    check_choice("backend", backend, BACKENDS)
    if backend in MODULES and not (torch.cuda.is_available() and family_of(torch.device("cuda")) == backend):
        raise UnsupportedError(f"backend={backend!r} needs device capability {NEEDS[backend]}, got {_capability()}")


def family_of(device: torch.device) -> str:
    """Which module's kernels run there: a key of MODULES, or ""."""
    facts = device_facts(device)
    return FAMILIES.get(facts, "") if facts else ""


@torch.compiler.assume_constant_result
def prefers_hopper(backend: str, device: torch.device) -> bool:
    """Whether a module without a record of its own takes Hopper's."""
    return backend == "sm90" or (backend == "auto" and family_of(device) == "sm90")


@torch.compiler.assume_constant_result
def serving_module(backend: str, device: torch.device, numerics: str, *shape: Any) -> str:
    """Which family of kernels runs the whole module: a key of MODULES, or "" for none. numerics: a record's token;
    shape: fields of `PoolShape`, one by one, since Dynamo takes no named tuple for a constant.

    Raises:
        UnsupportedError: backend="sm90" or "sm100" cannot serve this device or these sizes; the message says why.
    """
    family = backend if backend in MODULES else family_of(device)
    if backend == "reference" or not family:
        return ""
    reason = why_no_module(family, device, PoolShape(*shape), numerics)
    if reason and backend == family:
        raise UnsupportedError(f"backend={backend!r} cannot serve this call: {reason}; use backend='auto'")
    return "" if reason else family


def why_no_module(family: str, device: torch.device, shape: PoolShape, numerics: str) -> str | None:
    """Why the kernels of a family do not serve a module, None if they do."""
    if family_of(device) != family:
        return f"it needs device capability {NEEDS[family]}, got {_capability(device)}"
    if reason := _why_no_kernels(device):
        return reason
    specs = MODULES[family].specs_of(shape, numerics)._asdict()
    if not shape.has_value_proj:
        specs.pop("v")
    specs = {"attention_forward": specs["attention_forward"], **specs}  # what it says is nearest to the arguments
    reasons = ((name, spec.why_unsupported()) for name, spec in specs.items())
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
    family = family_of(device)
    why_not = why_no_module(family, device, shape, numerics) if family else "no kernel in this version"
    if backend != "reference" and why_not is None:
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
    others = "requested" if backend == "reference" else str(why_not)
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
