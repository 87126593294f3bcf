"""Faults that users of comparable libraries reported, as tests of the module: C01 to C04, C06 to C10, C18 to C25.

`test_cases_format.py` has those of the number format, of single operators and of widths: C04, C05, C11 to C17, C19,
C26. C27, a disk cache of compiled kernels, has no test yet: there are no compiled kernels.
"""

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import pma
from pma.functional import PMAWeights, pooled_attention
from pma.testing import ULPS_FP32, make_jagged, make_pma, oracle, relative_error, uneven_lengths

E = 64
PRECISIONS = ("mxfp8", "bf16", "fp32")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Results = dict[str, Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small_pma(**arguments) -> pma.PMA:
    return make_pma(**({"embed_dim": E, "num_heads": 2, "num_seeds": 2} | arguments))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, fullgraph=True, backend="aot_eager")


def run(
    call: Callable[..., Tensor], module: nn.Module, events: Tensor, *arguments: Tensor, dout: Tensor | None = None
) -> Results:
    """Output and all gradients (None included) of `call`, for the loss Σ out² or the output gradient `dout`."""
    module.zero_grad(set_to_none=True)
    leaf = events.detach().requires_grad_()
    out = call(leaf, *arguments)
    out.square().sum().backward() if dout is None else out.backward(dout)
    return {"out": out.detach(), "events": leaf.grad, **{name: p.grad for name, p in module.named_parameters()}}


def assert_same_bits(actual: Results, expected: Results, *, skip: tuple[str, ...] = ()) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in actual if name not in skip and not torch.equal(actual[name], expected[name])]
    assert different == []


def weight_grads(results: Results) -> Results:
    return {name: grad for name, grad in results.items() if name not in ("out", "events")}


# ------------------------------------------------------------------------------------- empty segments, tails


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("lengths", [(0, 5, 0, 0, 3, 0), (0, 0, 5), (5, 0, 0), (0, 0, 0)], ids=str)
def test_c01_empty_segments_are_zero_and_add_nothing(lengths: tuple[int, ...], precision: str) -> None:
    """A softmax over no event must give 0, not NaN, and leave every gradient as if the segment were not there."""
    module = small_pma(precision=precision)
    events, offsets = make_jagged(lengths, E)
    result = run(module, module, events, offsets)
    full = torch.tensor(lengths) > 0
    assert torch.equal(result["out"][~full], torch.zeros_like(result["out"][~full]))
    kept = full if full.any() else ~full  # B = 0 is another case
    without = run(module, module, events, offsets[torch.cat([torch.tensor([True]), kept])])
    assert torch.equal(result["out"][kept], without["out"])
    assert torch.equal(result["events"], without["events"])
    for name, grad in weight_grads(result).items():
        assert relative_error(grad, without[name]) <= ULPS_FP32, name  # NaN would fail
        assert grad.any() == full.any(), name


def test_c01_log_sum_exp_of_nothing_is_minus_infinity() -> None:
    """The saved log-sum-exp of an empty segment must be −inf, that of any other finite."""
    k, offsets = make_jagged((0, 5, 0, 0, 3, 0), E)
    for q in (torch.zeros(2, E), torch.randn(2, E)):
        _, lse = torch.ops.pma.plain_attention_forward(q, k, k, offsets, 2)
        args = (*torch.ops.pma.quantize(q, torch.tensor([0, 2]), 32), *torch.ops.pma.quantize(k, offsets, 32) * 2)
        _, lse_mxfp8, _ = torch.ops.pma.attention_forward(*args, offsets, 2, 2, "{}", torch.float32)
        for each in (lse, lse_mxfp8):
            assert torch.equal(each.isfinite().all(-1).all(-1), offsets.diff() > 0)
            assert each[offsets.diff() == 0].eq(-torch.inf).all()


@pytest.mark.parametrize("wrap", [lambda module: module, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("num_segments", [0, 1, 4])
@pytest.mark.parametrize("precision", ["mxfp8", "fp32"])
def test_c02_no_event_at_all(precision: str, num_segments: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """A batch without a single event must give zeros that are differentiable, with gradients 0 rather than None."""
    module = small_pma(precision=precision)
    offsets = torch.zeros(num_segments + 1, dtype=torch.int64)
    call = wrap(module)
    assert call(torch.zeros(0, E), offsets).grad_fn is not None
    result = run(call, module, torch.zeros(0, E), offsets)
    assert result["out"].shape == (num_segments, 2, E) and result["events"].shape == (0, E)
    assert [name for name, value in result.items() if value is None or value.any()] == []


def test_c02_torchrec_empty_jagged_tensor() -> None:
    """TorchRec's empty JaggedTensor has 1-D values and offsets of no element: it means no segment."""
    torchrec = pytest.importorskip("torchrec")
    module = small_pma()
    empty = torchrec.JaggedTensor.empty()
    assert empty.offsets().shape == (0,)
    out = module(empty)
    out.sum().backward()
    assert out.shape == (0, 2, E)
    assert not any(p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("num_seeds", [1, 32, 33])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_c03_empty_segments_for_every_width(head_dim: int, num_seeds: int, dtype: torch.dtype) -> None:
    """Length 0 must mean the same at every head width, number of seeds and dtype."""
    module = make_pma(embed_dim=2 * head_dim, num_heads=2, num_seeds=num_seeds)
    events, offsets = make_jagged((0, 5, 0, 0, 3, 0), 2 * head_dim, dtype=dtype)
    result = run(module, module, events, offsets)
    assert result["out"].dtype == result["events"].dtype == dtype
    assert not result["out"][offsets.diff() == 0].any()
    assert result["out"][offsets.diff() > 0].any(-1).all()
    assert all(value.isfinite().all() for value in result.values())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_c04_rows_outside_the_offsets_reach_nothing(garbage: float, precision: str) -> None:
    """Rows before the first and past the last offset must not reach an output, a block's amax or a weight gradient."""
    module = small_pma(precision=precision, value_projection=True)
    events, offsets = make_jagged((7, 0, 26), E)
    expected = run(module, module, events, offsets)
    for before, after in ((0, 7), (5, 7)):
        buffer = torch.full((before + 33 + after, E), garbage)
        buffer[before : before + 33] = events
        result = run(module, module, buffer, offsets + before)
        used, unused = result["events"][before : before + 33], result["events"].clone()
        unused[before : before + 33] = 0
        assert torch.equal(unused, torch.zeros_like(unused))
        assert_same_bits(result | {"events": used}, expected)


# --------------------------------------------------------------------------------------------------- lengths


def assert_whole_segment_counts(call: Callable[..., Tensor], module: nn.Module, length: int) -> None:
    """All events +1 but the last, −1, with equal weights: the mean is (L − 2)/L, each event's gradient alike."""
    events = torch.ones(length, E)
    events[-1] = -1.0
    signs = torch.tensor([1.0, -1.0]).repeat(E // 2)  # no component along an event: the norm passes it through
    result = run(call, module, events, torch.tensor([0, length]), dout=signs.expand(1, 1, E))
    mean = torch.full((1, 1, E), (length - 2) / length, dtype=torch.float64).float()
    assert torch.equal(result["out"], mean)
    weight = result["events"][0, 0]
    assert torch.equal(result["events"], (weight * signs).expand(length, E))
    assert abs(weight * length - 1) <= 2**-4  # E4M3 has four significant bits


def equal_weights_pma() -> pma.PMA:
    module = small_pma(num_seeds=1, norm_eps=0.0)
    nn.init.zeros_(module.query_proj.weight)
    return module


def test_c06_every_length_alone() -> None:
    """The last events of a length that no tile divides must not be dropped, forward or backward."""
    module = equal_weights_pma()
    for length in range(1, 261):
        assert_whole_segment_counts(module, module, length)


def test_c06_lengths_compiled() -> None:
    """The same when compiled, where sizes are symbols."""
    module, lengths = equal_weights_pma(), (1, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, 260)
    call = compiled(module)
    pma.mark_dynamic(events := torch.ones(3, E), offsets := torch.tensor([0, 3]))
    call(events, offsets)
    for length in lengths:
        assert_whole_segment_counts(call, module, length)


def test_c06_every_length_against_the_oracle() -> None:
    """Each length alone, without rounding: output and every gradient are those of the plain formula."""
    module = small_pma(precision="fp32").double()
    for length in range(2, 261):  # of one event, seeds and keys get gradient 0
        events, offsets = make_jagged([length], E, seed=length, dtype=torch.float64)
        expected = run(lambda *arguments: oracle(module, *arguments), module, events, offsets)
        result = run(module, module, events, offsets)
        assert [n for n in result if not relative_error(result[n], expected[n]) <= ULPS_FP32] == []


@pytest.mark.parametrize("num_seeds", [1, 2])
@pytest.mark.parametrize("lengths", [(0, 1, 0, 1), (5, 0, 130)], ids=str)
def test_c07_max_length_is_only_a_hint(lengths: tuple[int, ...], num_seeds: int) -> None:
    """A maximum length, right, far too large or too small, must not change a bit."""
    module = small_pma(num_seeds=num_seeds)
    events, offsets = make_jagged(lengths, E)
    expected = run(module, module, events, offsets)
    for max_length in (1, 2, 10**6):
        result = run(lambda *a, hint=max_length: module(*a, max_length=hint), module, events, offsets)
        assert_same_bits(result, expected)


# ------------------------------------------------------------------------------------------ strides, devices


def strided_events(events: Tensor) -> dict[str, Tensor]:
    """Views with the numbers of `events` and other strides or storage offsets."""
    wide = torch.randn(events.shape[0], 3 * E)
    wide[:, E : 2 * E] = events
    odd = torch.empty(events.numel() + 1)[1:].view_as(events).copy_(events)
    every_second = torch.empty(events.shape[0], 2 * E)[:, ::2].copy_(events)
    every_third_row = torch.empty(3 * events.shape[0], E)[::3].copy_(events)
    columns = torch.empty(E, events.shape[0]).t().copy_(events)
    return {
        "transposed": columns,
        "step 2": every_second,
        "rows": every_third_row,
        "slice": wide[:, E : 2 * E],
        "odd": odd,
    }


@pytest.mark.parametrize("precision", PRECISIONS)
def test_c08_events_of_any_stride(precision: str) -> None:
    """Transposed, sliced and unaligned events must give the bits of their contiguous copy."""
    module = small_pma(precision=precision)
    events, offsets = make_jagged((3, 0, 40), E)
    expected = run(module, module, events, offsets)
    for name, view in strided_events(events).items():
        assert torch.equal(view, events), name
        assert_same_bits(run(module, module, view, offsets), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_c08_output_gradients_of_any_stride(precision: str) -> None:
    """An expanded, sliced or transposed output gradient must give the bits of its contiguous copy."""
    module = small_pma(precision=precision)
    events, offsets = make_jagged((3, 0, 40), E)
    for dout in (
        torch.ones(()).expand(3, 2, E),
        torch.randn(3, 2, 3 * E)[..., E : 2 * E],
        torch.randn(E, 2, 3).permute(2, 1, 0),
        torch.randn(3, 2, 1).expand(3, 2, E),
    ):
        assert not dout.is_contiguous()
        expected = run(module, module, events, offsets, dout=dout.contiguous())
        assert_same_bits(run(module, module, events, offsets, dout=dout), expected)
    summed = run(lambda *a: module(*a).sum().expand(1), module, events, offsets, dout=torch.ones(1))
    ones = run(module, module, events, offsets, dout=torch.ones(3, 2, E))
    assert_same_bits(summed, ones, skip=("out",))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_c08_weights_of_any_stride(precision: str) -> None:
    """Transposed and sliced parameters must give the bits of their contiguous copies."""
    module = small_pma(precision=precision, value_projection=True)
    other = copy.deepcopy(module)
    for layer in (other.query_proj, other.key_proj, other.value_proj):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        assert not layer.weight.is_contiguous()
    other.seed_embs = nn.Parameter(torch.empty(2, 2 * E)[:, ::2].copy_(other.seed_embs.detach()))
    other.key_norm.weight = nn.Parameter(torch.ones(()).expand(E))
    events, offsets = make_jagged((3, 0, 40), E)
    assert_same_bits(run(other, other, events, offsets), run(module, module, events, offsets))


@pytest.mark.parametrize(("width", "columns"), [(64, slice(0, 64)), (40, slice(8, 40))])
def test_c09_views_of_a_keyed_jagged_tensor(width: int, columns: slice) -> None:
    """TorchRec hands out views into one buffer, at any storage offset and row pitch: they must equal their clones."""
    torchrec = pytest.importorskip("torchrec")
    lengths = torch.tensor([1, 2, 3, 0, 4, 1, 5, 0, 4])
    keyed = torchrec.KeyedJaggedTensor(["a", "b", "c"], torch.randn(20, width), lengths=lengths)
    embed_dim = columns.stop - columns.start
    module = make_pma(embed_dim=embed_dim, num_heads=1, num_seeds=2)
    for key in ("b", "c"):
        values, offsets = keyed[key].values()[:, columns], keyed[key].offsets()
        assert values.storage_offset() > 0
        view = torchrec.JaggedTensor(values, offsets=offsets)
        clone = torchrec.JaggedTensor(values.clone(memory_format=torch.contiguous_format), offsets=offsets.clone())
        assert torch.equal(module(view), module(clone))
        expected = run(module, module, clone.values(), clone.offsets())
        assert_same_bits(run(module, module, values, offsets), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_c10_offsets_of_every_dtype_and_rank(device: str) -> None:
    """Offsets of 32 and 64 bits must work alike; a wrong dtype, rank or size is refused by name and value."""
    module = small_pma(device=device)
    events, offsets = (x.to(device) for x in make_jagged((3, 0, 4), E))
    assert_same_bits(run(module, module, events, offsets.int()), run(module, module, events, offsets))
    for dtype in (torch.float32, torch.uint8):
        for wrong in (offsets.to(dtype), offsets.to(dtype)[None], offsets.to(dtype)[:0]):
            with pytest.raises(TypeError, match=rf"offsets must have dtype torch\.int32, torch\.int64, got {dtype}"):
                module(events, wrong)
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match="offsets must be 1-D, got 2-D"):
            module(events, offsets.to(dtype)[None])
        with pytest.raises(ValueError, match="offsets must have B . 1 >= 1 entries, got 0"):
            module(events, offsets.to(dtype)[:0])


@pytest.mark.parametrize("other", ["meta", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_c10_offsets_on_another_device(other: str) -> None:
    """Offsets, events and parameters on two devices must be refused with both devices named."""
    module = small_pma()
    events, offsets = make_jagged((3, 0, 4), E)
    for wrong in ((events, offsets.to(other)), (events.to(other), offsets), (events.to(other), offsets.to(other))):
        with pytest.raises(ValueError, match=rf"(cpu.*{other}|{other}.*cpu)"):
            module(*wrong)


# ------------------------------------------------------------------------------ compilation, host, repeats


STREAM = tuple(zip((7, 300, 1, 0, 2, 4096, 9, 0), (5, 1, 3, 5, 1, 3, 4, 0), strict=True))  # (T, B)


def compilations(module: pma.PMA, stream: Iterable[tuple[int, int]], prepare: Callable[[Tensor, Tensor], None]) -> int:
    """How often a stream of batches compiles; each batch must have the bits of eager, forward and backward."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(module, fullgraph=True, backend=counter)
    for i, (total, num_segments) in enumerate(stream):
        offsets = torch.linspace(0, total, num_segments + 1).long()
        events = torch.randn(total, E)
        if i == 0:
            prepare(events.requires_grad_(), offsets)
            call(events, offsets).sum().backward()
        assert_same_bits(run(call, module, events, offsets), run(module, module, events, offsets))
    return counter.frame_count


@pytest.mark.parametrize("first", [0, 3])
def test_c18_marked_sizes_compile_once(first: int) -> None:
    """Any stream of sizes, 0 and 1 included and whichever comes first, is one compilation after mark_dynamic."""
    assert compilations(small_pma(), STREAM[first:] + STREAM[:first], pma.mark_dynamic) == 1


def test_c18_unmarked_sizes_compile_seldom() -> None:
    """Without marks: at most three compilations for sizes from 2 up, one more for each combination of sizes 0 and 1."""
    module = small_pma()
    assert compilations(module, [(t, b) for t, b in STREAM if min(t, b) > 1] + [(5, 9), (77, 2)], lambda *_: None) <= 3
    combinations = {(min(t, 2), min(b, 2)) for t, b in STREAM if min(t, b) < 2}
    assert compilations(module, STREAM, lambda *_: None) <= 3 + len(combinations)


@NEEDS_CUDA
@pytest.mark.parametrize("precision", PRECISIONS)
def test_c19_no_host_sync_on_cuda(precision: str) -> None:
    """Forward and backward must not wait for the device."""
    module = small_pma(precision=precision, device="cuda")
    events, offsets = (x.cuda() for x in make_jagged((0, 5, 0, 300), E))
    run(module, module, events, offsets)  # first use may allocate and load
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = run(module, module, events, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(value.isfinite().all() for value in result.values())


@pytest.mark.parametrize(
    ("device", "num_segments", "repeats"), [("cpu", 128, 3), pytest.param("cuda", 4096, 100, marks=NEEDS_CUDA)]
)
def test_c20_deterministic_mode_repeats_its_bits(
    device: str, num_segments: int, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds' gradient, summed over many uneven segments, must not depend on the order of arrival."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it in this mode
    module = small_pma(device=device)
    events, offsets = (x.to(device) for x in make_jagged(uneven_lengths(num_segments, 12), E))
    torch.use_deterministic_algorithms(True)
    try:
        expected = run(module, module, events, offsets)
        for _ in range(repeats):
            assert_same_bits(run(module, module, events, offsets), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert expected["seed_embs"].any()


# --------------------------------------------------------------------------------------- autograd, autocast


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("wanted", ["events", *(n for n, _ in small_pma(value_projection=True).named_parameters())])
def test_c21_second_derivatives_are_refused(wanted: str, precision: str) -> None:
    """A gradient of a gradient must raise and name the module; it must never lack a term silently."""
    module = small_pma(precision=precision, value_projection=True)
    events, offsets = make_jagged((3, 0, 4), E)
    leaves = {"events": events.requires_grad_(), **dict(module.named_parameters())}
    loss = module(events, offsets).square().sum()
    with pytest.raises(RuntimeError, match="pma.PMA cannot be differentiated twice"):
        (gradient,) = torch.autograd.grad(loss, leaves[wanted], create_graph=True)
        (loss + gradient.square().sum()).backward()


AUTOCAST = {
    "off": lambda: torch.autocast("cpu", enabled=False),
    "bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
}


WEIGHT_HOLDERS = ("query_norm", "query_proj", "key_norm", "key_proj")


@pytest.mark.parametrize("wrap", [lambda module: module, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["off", "bf16", "fp16", "nested off"])
def test_c22_autocast(mode: str, dtype: torch.dtype, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Autocast sets the dtype of the output and nothing else; gradients keep the dtype of their tensor."""
    module = small_pma()
    call = wrap(module)
    events, offsets = make_jagged((3, 0, 40), E, dtype=dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(AUTOCAST.get(mode, AUTOCAST["bf16"])())
        if mode == "nested off":
            stack.enter_context(AUTOCAST["off"]())
        result = run(call, module, events, offsets)
    taken = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode, dtype)
    assert result["out"].dtype == taken and result["events"].dtype == dtype
    assert {grad.dtype for grad in weight_grads(result).values()} == {torch.float32}
    weights = PMAWeights(module.seed_embs, *(getattr(module, name).weight for name in WEIGHT_HOLDERS))
    function = functools.partial(pooled_attention, weights=weights, config=module.config(taken))
    assert_same_bits(result, run(function, module, events, offsets))


# ------------------------------------------------------------------------------------------------ module state


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("wrap", [lambda module: module, compiled], ids=["eager", "compiled"])
def test_c23_state_stays_plain_after_a_run(wrap: Callable[[nn.Module], nn.Module], precision: str) -> None:
    """A run must leave nothing on the module that copies, pickles or state dicts can't carry."""
    module = small_pma(precision=precision, value_projection=True)
    events, offsets = make_jagged((3, 0, 40), E)
    before = set(vars(module))
    run(wrap(module), module, events, offsets)
    assert set(vars(module)) - before <= {"_is_torch_compile"}  # torch's own flag
    expected = run(module, module, events, offsets)
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    fresh = small_pma(seed=1, precision=precision, value_projection=True)
    fresh.load_state_dict(module.state_dict(), strict=True)
    loaded = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded, fresh):
        assert_same_bits(run(twin, twin, events, offsets), expected)
    module.load_state_dict(small_pma(value_projection=True).state_dict(), strict=True)
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    assert torch.equal(average(events, offsets), expected["out"])
    half = module.half()
    result = run(half, half, events.half(), offsets)
    assert all(value.dtype == torch.float16 and value.isfinite().all() for value in result.values())


def test_c24_meta_init_leaves_no_garbage() -> None:
    """Built on meta and materialised, every parameter must be drawn again by some module's reset_parameters."""
    module = pma.PMA(256, 2, 64, value_projection=True, device="meta")
    assert {p.device.type for p in module.parameters()} == {"meta"} and list(module.buffers()) == []
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    for child in module.modules():
        if list(child.parameters(recurse=False)):
            child.reset_parameters()
    built = dict(pma.PMA(256, 2, 64, value_projection=True).named_parameters())
    for name, parameter in module.named_parameters():
        standard_error = built[name].std() / parameter.numel() ** 0.5
        assert (parameter.mean() - built[name].mean()).abs() <= 6 * standard_error, name
        assert (parameter.std() - built[name].std()).abs() <= 6 * standard_error, name
    key_proj = module.key_proj.weight.clone()
    module.reset_parameters()  # its own parameter only
    assert torch.equal(module.key_proj.weight, key_proj)


def test_c25_weights_of_a_jagged_tensor_are_not_used() -> None:
    """TorchRec keeps per-event ids in a JaggedTensor's weights: they must not change a result."""
    torchrec = pytest.importorskip("torchrec")
    module = small_pma()
    events, offsets = make_jagged((3, 0, 4), E)
    expected = run(module, module, events, offsets)
    for weights in (None, torch.full((7,), torch.nan), torch.arange(7)):

        def call(leaf: Tensor, weights: Tensor | None = weights) -> Tensor:
            return module(torchrec.JaggedTensor(leaf, offsets=offsets, weights=weights))

        assert_same_bits(run(call, module, events), expected)
