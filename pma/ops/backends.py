"""Which implementation serves an operator. Today: the PyTorch reference on every device."""

import torch

from pma.checks import UnsupportedError, check_choice

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


def check_backend(backend: str) -> None:
    """Raise unless `backend` names one that this version can serve.

    Raises:
        ValueError: not one of BACKENDS.    UnsupportedError: "sm90" or "sm100", which have no kernels yet.
    """
    check_choice("backend", backend, BACKENDS)
    if backend in ("sm90", "sm100"):
        raise UnsupportedError(
            f"backend={backend!r} has no kernels in this version, got device capability {_capability()}; "
            "use backend='auto' or 'reference'"
        )


def report(backend: str) -> dict[str, str]:
    """Operator → implementation and why, for `PMA.backend_report()`."""
    why = "requested" if backend == "reference" else "no kernels for this device in this version"
    return dict.fromkeys(OPERATORS, f"reference ({why})")


def _capability() -> str:
    if not torch.cuda.is_available():
        return "none (no CUDA device)"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"
