"""Pooling by Multihead Attention over jagged events, in MXFP8."""

from typing import Any

import torch
from torch import Tensor, nn

from pma.checks import (
    UnsupportedError,
    check_bool,
    check_choice,
    check_finite,
    check_int,
    check_same_device,
    check_unsharded,
)
from pma.functional import PMAWeights, pooled_attention, pooled_attention_unquantized
from pma.jagged import FLOAT_DTYPES, JaggedInput, to_values_and_offsets
from pma.layouts import BLOCK
from pma.modules.layers import Projection
from pma.numerics import HOPPER_NUMERICS, AttentionNumerics
from pma.ops import backends
from pma.ops.autograd import PMAConfig
from pma.ops.pool import PoolShape

PRECISIONS = ("mxfp8", "bf16", "fp32")
SEEDS_STD = 0.02
DEFAULT_NUMERICS = AttentionNumerics()
DEFAULT_TOKEN, HOPPER_TOKEN = DEFAULT_NUMERICS.token(), HOPPER_NUMERICS.token()


class PMA(nn.Module):
    """Pool each segment's events into `num_seeds` vectors: learned seeds attend over the segment.

        x = RMSNorm(events);  q = RMSNorm(seeds) Wqᵀ;  k = x Wkᵀ;  v = x  (or x Wvᵀ)
        out[b] = softmax(q k_bᵀ / sqrt(D)) v_b      for each head of width D = embed_dim / num_heads

    Args:
        embed_dim: E, a multiple of 32.
        num_heads: H; embed_dim / num_heads must be a multiple of 32.
        num_seeds: S, any positive number.
        value_projection: project the values too (otherwise they are the normalised events).
        norm_eps: added to the mean square of both norms; 0 is allowed (an event of zeros is then NaN).
        precision: "mxfp8", or "bf16" / "fp32": the same mathematics without block scales (plain PyTorch).
        numerics: rounding choices of "mxfp8"; None takes the backend's own record.
        backend: "auto" (kernels where the device has them, else the reference), "reference", "sm90", "sm100".
        device, dtype: of the parameters.
    Raises:
        TypeError, ValueError: an argument of the wrong kind or value.
        UnsupportedError: a width that no backend serves, or a named backend that cannot serve.

    Example:
        >>> pool = pma.PMA(embed_dim=64, num_heads=2, num_seeds=4)
        >>> pool(torch.randn(7, 64), torch.tensor([0, 3, 3, 7])).shape
        torch.Size([3, 4, 64])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, num_seeds: int, *, value_projection: bool = False,
        norm_eps: float = 1e-6, precision: str = "mxfp8", numerics: AttentionNumerics | None = None,
        backend: str = "auto", device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check_widths(embed_dim, num_heads, num_seeds)
        check_choice("precision", precision, PRECISIONS)
        backends.check_backend(backend)
        check_finite("norm_eps", norm_eps)
        check_bool("value_projection", value_projection)
        if dtype is not None:
            check_choice("dtype", dtype, FLOAT_DTYPES)
        if numerics is not None and not isinstance(numerics, AttentionNumerics):
            raise TypeError(f"numerics must be a pma.AttentionNumerics or None, got {type(numerics).__name__}")
        self.embed_dim, self.num_heads, self.num_seeds = embed_dim, num_heads, num_seeds
        self.norm_eps, self._precision, self._backend = norm_eps, precision, backend
        self._numerics = numerics
        self._numerics_token = None if numerics is None else numerics.token()
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.seed_embs = nn.Parameter(torch.empty(num_seeds, embed_dim, **like))
        self.query_norm = nn.RMSNorm(embed_dim, eps=norm_eps, **like)
        self.query_proj = Projection(embed_dim, **like)
        self.key_norm = nn.RMSNorm(embed_dim, eps=norm_eps, **like)
        self.key_proj = Projection(embed_dim, **like)
        self.value_proj = Projection(embed_dim, **like) if value_projection else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the seeds again (std 0.02); children have `reset_parameters` of their own."""
        nn.init.normal_(self.seed_embs, std=SEEDS_STD)

    def forward(self, events: JaggedInput, offsets: Tensor | None = None, *, max_length: int | None = None) -> Tensor:
        """Pool `events`.

        Args:
            events: [T, E] float with `offsets`; or a TorchRec JaggedTensor (its weights are not used); or a
                torch.nested tensor [B, j, E] of jagged layout without holes. Any strides and storage offset.
            offsets: [B+1] int32 or int64, on the device of events: segment b is rows offsets[b] … offsets[b+1] − 1.
                Not read on the host; `pma.validate_offsets` checks the values.
            max_length: an upper bound of the lengths, only a hint: no result depends on it.
        Returns:
            [B, S, E] contiguous, in the dtype of events, or autocast's where that is on; 0 for empty segments.
            Rows of events outside the offsets reach no result and get gradient 0.
        Raises:
            TypeError, ValueError: wrong type, dtype, rank, size or device.    UnsupportedError: nested with holes, or
                parameters that are DTensors.
        Note: no host sync; differentiable once.
        """
        values, offsets = to_values_and_offsets(events, offsets, embed_dim=self.embed_dim)
        check_same_device("events", values, "the parameters", self.seed_embs)
        if max_length is not None:
            check_int("max_length", max_length, least=0)
        weights = PMAWeights(
            self.seed_embs,
            self.query_norm.weight,
            self.query_proj.weight,
            self.key_norm.weight,
            self.key_proj.weight,
            None if self.value_proj is None else self.value_proj.weight,
        )
        for name, weight in zip(weights._fields, weights, strict=True):
            check_unsharded(name, weight)
        config = self.config(_output_dtype(values))
        if self.precision == "mxfp8":
            return pooled_attention(values, offsets, weights, config)
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        if values.dtype == torch.float64 and self.precision == "fp32":
            dtype = torch.float64
        return pooled_attention_unquantized(values, offsets, weights, config, dtype)

    @property
    def precision(self) -> str:
        """Fixed at construction."""
        return self._precision

    @property
    def backend(self) -> str:
        """Fixed at construction."""
        return self._backend

    @property
    def numerics(self) -> AttentionNumerics:
        """Rounding choices: those given at construction, else the backend's own (Hopper's differ)."""
        if self._numerics is not None:
            return self._numerics
        return HOPPER_NUMERICS if backends.prefers_hopper(self.backend, self.seed_embs.device) else DEFAULT_NUMERICS

    @property
    def _token(self) -> str:
        """Of `numerics`."""
        if self._numerics_token is not None:
            return self._numerics_token
        is_hopper = backends.prefers_hopper(self.backend, self.seed_embs.device)
        return HOPPER_TOKEN if is_hopper else DEFAULT_TOKEN

    def config(self, out_dtype: torch.dtype) -> PMAConfig:
        """Static facts of this module for `pma.functional`."""
        record = self.numerics
        return PMAConfig(
            num_heads=self.num_heads,
            norm_eps=self.norm_eps,
            numerics=self._token,
            dp_operands=record.dp_operands,
            columns_per_scale=record.columns_per_scale(self.embed_dim // self.num_heads),
            projection_columns_per_scale=self.embed_dim if record.uniform_scales else BLOCK,
            headroom_exponent=record.headroom_exponent,
            dp_headroom_exponent=record.dp_headroom_exponent,
            k_smoothing=record.k_smoothing,
            out_dtype=out_dtype,
            backend=self.backend,
        )

    def backend_report(self) -> dict[str, str]:
        """Operator → the implementation that serves it and why; `numerics` and `precision` are named too."""
        if self.precision != "mxfp8":
            return {"precision": f"{self.precision}: reference without quantisation, plain PyTorch"}
        return {"precision": "mxfp8", "numerics": repr(self.numerics)} | self._operators()

    def _operators(self) -> dict[str, str]:
        weight = self.key_norm.weight
        dtypes = (weight.dtype, weight.dtype, torch.int64, weight.dtype)
        has_values = self.value_proj is not None
        shape = PoolShape(self.embed_dim, self.num_heads, self.num_seeds, has_values, *dtypes)
        return backends.report(self.backend, weight.device, shape, self._token)

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_seeds={self.num_seeds}, "
            f"norm_eps={self.norm_eps}, precision={self.precision!r}, numerics={self._token}, "
            f"backend={self.backend!r}"
        )


def _output_dtype(events: Tensor) -> torch.dtype:
    """Autocast's dtype where that is on, else the dtype of events, which themselves are never cast down."""
    device_type = events.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return events.dtype


def _check_widths(embed_dim: int, num_heads: int, num_seeds: int) -> None:
    check_int("embed_dim", embed_dim, least=1)
    check_int("num_heads", num_heads, least=1)
    check_int("num_seeds", num_seeds, least=1)
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
    head_dim = embed_dim // num_heads
    if embed_dim % BLOCK or head_dim % BLOCK:
        raise UnsupportedError(
            f"embed_dim must be a multiple of 32 and embed_dim / num_heads one of 32, 64, 96, 128, … "
            f"(a multiple of 32), got embed_dim={embed_dim}, num_heads={num_heads} (head width {head_dim})"
        )
