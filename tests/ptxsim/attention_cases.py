"""FlashAttention-4 (bf16) and cuDNN-frontend (MXFP8) in the simulator; see quack_cases.py for how a case works."""

import math
import pathlib
from types import SimpleNamespace

import torch
from quack_cases import dequantized, packed, to_mx
from torch import Tensor

import ptxsim

BF16_ERROR = 6e-3  # of outputs: P and O rounded to bf16
BF16_GRADIENT_ERROR = 1e-2  # dS too
MXFP8_ERROR = 4e-2  # P in E4M3
MXFP8_GRADIENT_ERROR = 5e-2
LSE_ERROR = 1e-4
HEAD_DIM = 128


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double().reshape(exact.shape) - exact).norm() / exact.norm()).item()


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """float64; q [S, H, D], k and v [S, K, D] → out [S, H, D], lse [H, S]."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (
        each.double().transpose(0, 1) for each in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        rows, columns = scores.shape[-2:]
        keep = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~keep, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def _segments(lengths: list[int]) -> tuple[list[tuple[int, int]], dict]:
    cuts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    offsets, longest = torch.tensor(cuts, dtype=torch.int32), max(lengths)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return list(zip(cuts, cuts[1:], strict=False)), dict(zip(names, (offsets, offsets, longest, longest), strict=True))


def flash_forward(
    lengths: list[int], heads: int = 1, kv_heads: int = 1, *, is_causal: bool, is_varlen: bool = False, **options
) -> ptxsim.simulate:
    """One sequence of lengths[0] tokens, or with is_varlen several in one buffer."""
    import flash_attn.cute.interface as flash

    torch.manual_seed(sum(lengths) + heads)
    total = sum(lengths)
    q = torch.randn(total, heads, HEAD_DIM).bfloat16()
    k, v = (torch.randn(total, kv_heads, HEAD_DIM).bfloat16() for _ in range(2))
    parts, varlen = _segments(lengths)
    inputs = (q, k, v) if is_varlen else (q[None], k[None], v[None])
    with ptxsim.simulate(**options) as simulation:
        out, lse = flash._flash_attn_fwd(*inputs, causal=is_causal, return_lse=True, **(varlen if is_varlen else {}))[
            :2
        ]
    exact = [attention(q[a:b], k[a:b], v[a:b], is_causal=is_causal) for a, b in parts]
    exact_out, exact_lse = torch.cat([each[0] for each in exact]), torch.cat([each[1] for each in exact], 1)
    assert relative_error(out, exact_out) < BF16_ERROR, relative_error(out, exact_out)
    assert (lse.double().reshape(exact_lse.shape) - exact_lse).abs().max() < LSE_ERROR
    return simulation


def flash_cross_forward(
    num_seeds: int, lengths: list[int], heads: int, *, scheduler: str = "tile", **options
) -> ptxsim.simulate:
    """The same seeds against segments of events.

    scheduler: "tile", FA4's default for jagged sequences, the seeds repeated for each segment: a CTA for each tile of
    Q; "dynamic", the same with CTAs that stay and ask a counter; "dense", the seeds as a batch of equal sequences, for
    which FA4 has pairs of CTAs that stay.
    """
    import flash_attn.cute.interface as flash
    from flash_attn.cute.prepare_scheduler import SchedulerMetadataTensorsTorch

    torch.manual_seed(sum(lengths) + heads)
    seeds = torch.randn(num_seeds, heads, HEAD_DIM).bfloat16()
    k, v = (torch.randn(sum(lengths), heads, HEAD_DIM).bfloat16() for _ in range(2))
    parts, varlen = _segments(lengths)
    q = seeds.repeat(len(lengths), 1, 1, 1)
    if scheduler == "dense":
        del varlen["cu_seqlens_q"], varlen["max_seqlen_q"]
    else:
        q = q.flatten(0, 1)
        varlen |= {"cu_seqlens_q": num_seeds * torch.arange(len(lengths) + 1).int(), "max_seqlen_q": num_seeds}
    if scheduler == "dynamic":
        counter = torch.zeros(1, dtype=torch.int32)
        varlen["scheduler_metadata"] = SchedulerMetadataTensorsTorch(None, None, None, None, counter)
    with ptxsim.simulate(**options) as simulation:
        out, _ = flash._flash_attn_fwd(q, k, v, **varlen)[:2]
    for actual, (a, b) in zip(out.view(-1, num_seeds, heads, HEAD_DIM), parts, strict=True):
        exact, _ = attention(seeds, k[a:b], v[a:b], is_causal=False)
        assert relative_error(actual, exact) < BF16_ERROR, relative_error(actual, exact)
    return simulation


def flash_backward(
    lengths: list[int], heads: int = 1, kv_heads: int = 1, *, is_causal: bool, is_varlen: bool = False, **options
) -> ptxsim.simulate:
    import flash_attn.cute.interface as flash

    torch.manual_seed(3)
    total = sum(lengths)
    q, dout = (torch.randn(total, heads, HEAD_DIM).bfloat16() for _ in range(2))
    k, v = (torch.randn(total, kv_heads, HEAD_DIM).bfloat16() for _ in range(2))
    parts, varlen = _segments(lengths)
    leaves = [each.double().requires_grad_() for each in (q, k, v)]
    exact = [attention(*(leaf[a:b] for leaf in leaves), is_causal=is_causal) for a, b in parts]
    out, lse = torch.cat([each[0] for each in exact]), torch.cat([each[1] for each in exact], 1)
    gradients = torch.autograd.grad(out, leaves, dout.double())
    inputs = [q, k, v, out.detach().bfloat16(), dout, lse.detach().float()]
    if not is_varlen:
        inputs = [each[None] for each in inputs]
    with ptxsim.simulate(**options) as simulation:
        results = flash._flash_attn_bwd(*inputs, causal=is_causal, **(varlen if is_varlen else {}))
    for name, actual, expected in zip(("dQ", "dK", "dV"), results, gradients, strict=False):
        assert relative_error(actual, expected) < BF16_GRADIENT_ERROR, (name, relative_error(actual, expected))
    return simulation


def cudnn_forward(head_dim: int, length: int, heads: int, *, is_causal: bool, **options) -> ptxsim.simulate:
    """MXFP8 with non-uniform scales; head_dim 128, or 192 for q and k."""
    from cudnn.frost.template_loader import load_template
    from cudnn.sdpa.fwd.config_sm100 import TemplateParams
    from cudnn.sdpa.fwd.kernels import sm100

    torch.manual_seed(5)
    file = "prefill_d192_d128_mxfp8.py" if head_dim == 192 else "prefill_d128_mxfp8.py"
    parameters = TemplateParams(dtype_qkv=0, dtype_o=2, **({"window_right": 0} if is_causal else {}))
    q, k = (torch.randn(1, length, heads, head_dim) for _ in range(2))
    v = torch.randn(1, length, heads, HEAD_DIM)
    (q_data, q_scales), (k_data, k_scales) = to_mx(q), to_mx(k)
    vt_data, v_scales = to_mx(v.permute(0, 2, 3, 1).contiguous())  # scaled along the sequence
    v_data = vt_data.view(torch.uint8).permute(0, 3, 1, 2).contiguous()
    tiles = length // 128
    bytes_ = [_row_scales(q_scales, length), _row_scales(k_scales, length), _value_scales(v_scales, tiles)]
    out = torch.full((1, length, heads, HEAD_DIM), float("nan"), dtype=torch.bfloat16)
    lse, scratch, amax = torch.zeros(1, heads, length), torch.zeros(4096), torch.zeros(1)
    scale = 1 / math.sqrt(head_dim)

    def strides(tensor: Tensor) -> tuple[int, ...]:
        return tuple(tensor.stride(axis) for axis in range(3))

    data = [q_data.view(torch.uint8), k_data.view(torch.uint8), v_data]
    arguments = [
        *(each.data_ptr() for each in (*data, out, lse, scratch, scratch, scratch)),
        (1, heads, heads, length, length, 0), *(strides(each) for each in (*data, out)), (heads * length, length, 1),
        0, scale * math.log2(math.e), 0, 0, None, None, None, None, None, None, (0, 0), None, 0,
        *(each.data_ptr() for each in bytes_), (tiles, tiles, tiles), amax.data_ptr(), None, None, None, (0, 0, 0), 0,
    ]  # fmt: skip
    with ptxsim.simulate(**options) as simulation:
        template = pathlib.Path(next(iter(sm100.__path__))) / file
        load_template(template, parameters, tag=f"case{head_dim}{is_causal}").compile_prepared()(*arguments)
    values = dequantized(vt_data, v_scales).permute(0, 3, 1, 2)[0]
    exact, exact_lse = attention(
        dequantized(q_data, q_scales)[0], dequantized(k_data, k_scales)[0], values, is_causal=is_causal
    )
    assert relative_error(out[0], exact) < MXFP8_ERROR, relative_error(out[0], exact)
    assert (lse[0].double() - exact_lse).abs().max() < LSE_ERROR
    assert abs(amax.item() - exact.abs().max().item()) < MXFP8_ERROR * exact.abs().max().item()
    return simulation


def _row_scales(scales: Tensor, length: int) -> Tensor:
    """For each head: tiles of 128 rows."""
    rows = scales.view(torch.uint8).permute(0, 2, 1, 3).reshape(-1, length, scales.shape[-1]).contiguous()
    return packed(rows.view(torch.float8_e8m0fnu)).view(torch.uint8).reshape(-1)


def _value_scales(scales: Tensor, tiles: int) -> Tensor:
    """For each head and tile of 128 tokens: 128 columns of V by 4 blocks of tokens."""
    blocks = scales.view(torch.uint8).reshape(-1, HEAD_DIM, tiles, 4).permute(0, 2, 1, 3).reshape(-1, HEAD_DIM, 4)
    return packed(blocks.contiguous().view(torch.float8_e8m0fnu)).view(torch.uint8).reshape(-1).contiguous()


def cudnn_backward(length: int, *, is_causal: bool, **options) -> ptxsim.simulate:
    """MXFP8 with non-uniform scales, head width 256: scale repacks, row sums, dQ, dK and dV from one module."""
    from cudnn.sdpa.bwd.api_dsl_mxfp8_sm100 import SdpaBwdDslSm100Mxfp8

    torch.manual_seed(4)
    width = 256
    q, k, v, dout = (torch.randn(1, 1, length, width) for _ in range(4))
    by_row = {name: _scaled_by_row(each) for name, each in {"q": q, "k": k, "v": v, "do": dout}.items()}
    by_column = {name: _scaled_by_column(each) for name, each in {"q": q, "k": k, "do": dout}.items()}
    leaves = [by_row[name][2].clone().requires_grad_() for name in "qkv"]
    out, lse = attention(*(leaf[0].transpose(0, 1) for leaf in leaves), is_causal=is_causal)
    gradients = torch.autograd.grad(out, leaves, by_row["do"][2][0].transpose(0, 1))
    empty = [_as_stored(torch.full((1, 1, length, width), float("nan")).bfloat16()) for _ in range(3)]
    half = {"o": _as_stored(out.detach().transpose(0, 1)[None].bfloat16()), "do_f16": _as_stored(dout.bfloat16())}
    statistics = lse.detach().float().reshape(1, 1, length, 1).contiguous()
    tensors = {name: each[0] for name, each in by_row.items()} | {f"{n}_T": each[0] for n, each in by_column.items()}
    tensors |= half | {"stats": statistics} | dict(zip(("dq", "dk", "dv"), empty, strict=True))
    api = _backward_api(SdpaBwdDslSm100Mxfp8, tensors, length, is_causal)
    with ptxsim.simulate(**options) as simulation:
        api.compile()
        workspace = torch.zeros(api.scratch_workspace_bytes() + 1024, dtype=torch.uint8)
        api.execute(
            *(tensors[name] for name in ("q", "k", "v", "o", "do", "stats", "dq", "dk", "dv")), workspace=workspace,
            **{f"{name}_T_tensor": each[0] for name, each in by_column.items()}, do_f16_tensor=half["do_f16"],
            **{f"sf_{name}": each[1] for name, each in by_row.items()},
            **{f"sf_{name}_T": each[1] for name, each in by_column.items()},
        )  # fmt: skip
    for name, actual, expected in zip(("dQ", "dK", "dV"), empty, gradients, strict=True):
        assert relative_error(actual, expected) < MXFP8_GRADIENT_ERROR, (name, relative_error(actual, expected))
    return simulation


def _as_stored(values: Tensor) -> Tensor:
    """Logical [batch, head, sequence, width] over storage [batch, sequence, head, width]."""
    return values.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)


def _scaled_by_row(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    data, scales = to_mx(values.contiguous())
    rows = scales.view(torch.uint8).view(1, values.shape[2], -1).contiguous().view(torch.float8_e8m0fnu)
    stored = _as_stored(data.view(torch.uint8)).view(torch.float8_e4m3fn)
    return stored, packed(rows).view(torch.uint8).reshape(-1), dequantized(data, scales)


def _scaled_by_column(values: Tensor) -> tuple[Tensor, Tensor]:
    data, scales = to_mx(values.transpose(-1, -2).contiguous())
    width = values.shape[3]
    tiles = packed(scales.view(torch.uint8).view(1, width, -1).contiguous().view(torch.float8_e8m0fnu))
    ordered = tiles.view(torch.uint8).reshape(1, width // 128, -1).transpose(0, 1).contiguous().reshape(-1)
    stored = _as_stored(data.view(torch.uint8).transpose(-1, -2).contiguous()).view(torch.float8_e4m3fn)
    return stored, ordered


def _backward_api(api_class: type, tensors: dict[str, Tensor], length: int, is_causal: bool):
    """The backward's front end, set up past the questions it asks of a real device."""
    import cudnn.frost.device
    import cudnn.sdpa.fwd.prepared

    cudnn.frost.device.compute_capability = lambda *arguments, **options: (10, 0)
    cudnn.frost.device.resolve_device = lambda *arguments, **options: 0
    cudnn.sdpa.fwd.prepared._DLPACK_CPU = 2
    api, width = api_class.__new__(api_class), tensors["q"].shape[3]
    settings = {
        "_compiled": None, "batch_size": 1, "h_q": 1, "h_kv": 1, "s_q_max": length, "s_k_max": length,
        "head_dim_qk": width, "head_dim_v": width, "_gqa_group": 1, "is_causal": is_causal, "p_scale_log2": 8,
        "out_dtype": torch.bfloat16, "dtype": torch.float8_e4m3fn, "scale_softmax": 1 / math.sqrt(width),
        "_ensure_support_checked": lambda: None, "_get_default_stream": lambda stream: 0,
        "_value_error_if": lambda condition, message: None,
    }  # fmt: skip
    for name, tensor in tensors.items():
        settings[f"{name}_desc"] = SimpleNamespace(
            shape=tuple(tensor.shape), stride=tuple(tensor.stride()), dtype=tensor.dtype,
            device=SimpleNamespace(index=0, type="cuda"),
        )  # fmt: skip
    for name, value in settings.items():
        setattr(api, name, value)
    return api
