"""Attention on a GPU: every kernel's numbers, memory and manners, where the kernels are (``make gpu``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.core.host import Host
from lightning_accel.techniques.flash_attention.backends import BACKENDS, Backend, attend
from lightning_accel.techniques.flash_attention.call import AttentionCall
from support.attention_zoo import FOUND
from support.errors import relative_error

DEVICE = "cuda"
BATCH, HEADS, LENGTH, HEAD_DIM = 2, 3, 96, 64

pytestmark = [
    pytest.mark.gpu,
    # What compilers and drivers say about the machine is no fault of ours: it is shown, not raised.
    pytest.mark.filterwarnings("default"),
]


def installed(name: str) -> Backend:
    """The backend; the test is skipped where it does not work."""
    reason = BACKENDS[name].unavailable(Host.detect(DEVICE))
    if reason is not None:
        pytest.skip(reason)
    return BACKENDS[name]


# -- every kernel's numbers ----------------------------------------------------------------------------------------


def _plain(call: AttentionCall) -> AttentionCall:
    return call


def _causal(call: AttentionCall) -> AttentionCall:
    return replace(call, is_causal=True)


def _scaled(call: AttentionCall) -> AttentionCall:
    return replace(call, scale=0.3)


def _padding(call: AttentionCall) -> AttentionCall:
    lengths = torch.tensor([LENGTH, LENGTH // 2], device=DEVICE)
    return replace(call, mask=(torch.arange(LENGTH, device=DEVICE) < lengths[:, None])[:, None, None])


def _padding_and_causal(call: AttentionCall) -> AttentionCall:
    return _causal(_padding(call))


def _bias(call: AttentionCall) -> AttentionCall:
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, device=DEVICE, dtype=call.query.dtype)
    return replace(call, mask=bias)


def _learned_bias(call: AttentionCall) -> AttentionCall:
    call = _bias(call)
    assert call.mask is not None
    return replace(call, mask=call.mask.requires_grad_())


def _window(call: AttentionCall) -> AttentionCall:
    return replace(call, window=(16, 8))


KINDS: dict[str, Callable[[AttentionCall], AttentionCall]] = {
    "plain": _plain,
    "causal": _causal,
    "scaled": _scaled,
    "padding": _padding,
    "padding and causal": _padding_and_causal,
    "bias": _bias,
    "learned bias": _learned_bias,
    "window": _window,
}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make_call(dtype: torch.dtype, length: int = LENGTH, batch: int = BATCH) -> AttentionCall:
    """Random parts of one packed projection, as (B, H, T, D) views that ask for gradients."""
    packed = torch.randn(batch, length, 3, HEADS, HEAD_DIM, device=DEVICE).to(dtype)
    q, k, v = (part.transpose(1, 2).requires_grad_() for part in packed.unbind(2))
    return AttentionCall(query=q, key=k, value=v)


def by_hand(call: AttentionCall) -> Tensor:
    call = call.with_dense_mask()
    scores = call.query @ call.key.transpose(-2, -1) * call.true_scale
    if call.is_causal:
        columns = torch.arange(scores.shape[-1], device=DEVICE)
        scores = scores.masked_fill(columns > columns[:, None], -math.inf)
    if call.mask is not None:
        is_bool = call.mask.dtype == torch.bool
        scores = scores.masked_fill(~call.mask, -math.inf) if is_bool else scores + call.mask
    return scores.softmax(dim=-1) @ call.value


def in_float64(call: AttentionCall) -> AttentionCall:
    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    mask = call.mask if call.mask is None or call.mask.dtype == torch.bool else wide(call.mask)
    return replace(call, query=wide(call.query), key=wide(call.key), value=wide(call.value), mask=mask)


def results(call: AttentionCall, out: Tensor) -> list[Tensor]:
    """The output, then the gradients of queries, keys, values and a learned bias."""
    wanted = [t for t in (call.query, call.key, call.value, call.mask) if t is not None and t.requires_grad]
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=DEVICE).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, wanted, cotangent)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_kernel_agrees_with_float64(name: str, kind: str, dtype: torch.dtype) -> None:
    backend = installed(name)
    call = KINDS[kind](make_call(dtype))
    lack = backend.lacks(call)
    if lack is not None:
        pytest.skip(lack)
    reference = in_float64(call)
    expected, actual = results(reference, by_hand(reference)), results(call, attend(call, backend))
    assert actual[0].dtype == dtype
    for got, want in zip(actual, expected, strict=True):
        assert relative_error([got], [want]) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_kernel_lacks_is_computed_all_the_same(name: str) -> None:
    backend = installed(name)
    call = _padding_and_causal(make_call(torch.float32))
    reference = in_float64(call)
    expected, actual = results(reference, by_hand(reference)), results(call, attend(call, backend))
    assert relative_error(actual, expected) < 1e-2  # of TensorFloat-32, if that is what a kernel takes


def test_windows_are_for_flash_attn_and_all_others_get_a_mask() -> None:
    backend = installed("flash-attn")
    call = _window(make_call(torch.bfloat16))
    assert backend.lacks(call) is None
    assert relative_error([attend(call, backend)], [attend(call, BACKENDS["sdpa"])]) < 2e-2


# -- hand-written modules ------------------------------------------------------------------------------------------


def module_results(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    cotangent = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
    gradients = torch.autograd.grad(out, [x, *module.parameters()], cotangent, allow_unused=True)
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


def batch(size: int, length: int) -> Tensor:
    """(B, T, 32), the last two positions of the first sample padding."""
    x = torch.randn(size, length, 32, device=DEVICE)
    x[0, length - 2 :] = 0
    return x


def fused(module: nn.Module, x: Tensor, backend: str = "sdpa") -> AcceleratedModel:
    """Flash attention and nothing else, in force; a backend that is named, however fast it is."""
    settings = {"flash_attention": backend, "trust": "measured" if backend == "auto" else "checked"}
    plan = Plan().replace(**settings, precision="32-true", memory_format="off", inplace_activations=False)
    handle = accelerate(module, plan)
    for _ in range(2):
        with handle.step():
            out = module(x)
        out.square().mean().backward()
        module.zero_grad()
    return handle


@pytest.mark.parametrize("name", FOUND)
def test_every_spelling_computes_in_float32_what_it_did(name: str) -> None:
    module, inputs = FOUND[name]().to(DEVICE), [batch(2, 16), batch(3, 24)]
    try:
        expected = [module_results(module, x) for x in inputs]
    except RuntimeError as error:
        pytest.skip(f"this spelling makes tensors on the CPU: {str(error).splitlines()[0]}")
    handle = fused(module, inputs[0])
    is_on_the_host = name == "causal_by_assignment"  # its mask, which no kernel takes
    assert handle.report.applied("flash_attention") == ([] if is_on_the_host else [""]), handle.report.to_text()
    for x, want in zip(inputs, expected, strict=True):
        assert relative_error(module_results(module, x), want) < 5e-5
    handle.undo()


@pytest.mark.parametrize("name", ["causal_buffer", "causal_filled_in_place", "function_outside"])
def test_masks_from_buffers_wait_for_the_device_once_and_never_again(name: str) -> None:
    """A look into the mask says that it is causal; looking at every call would stop the GPU's queue every time."""
    module, x = FOUND[name]().to(DEVICE), batch(2, 16)
    handle = fused(module, x)
    assert handle.report.applied("flash_attention") == [""], handle.report.to_text()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            with handle.step():
                out = module(x)
            out.square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    handle.undo()


def test_auto_decides_and_the_numbers_stay() -> None:
    module, x = FOUND["causal_buffer"]().to(DEVICE), batch(4, 64)
    expected = module_results(module, x)
    handle = fused(module, x, "auto")
    assert relative_error(module_results(module, x), expected) < 5e-5
    handle.undo()
    assert relative_error(module_results(module, x), expected) < 1e-6


# -- memory --------------------------------------------------------------------------------------------------------


def peak_bytes(step: Callable[[], Any]) -> int:
    step()  # workspaces and compiled code are there from now on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.needs_kernels("a fused kernel keeps no scores")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_peak_of_every_kernel_grows_with_the_length(name: str, is_causal: bool) -> None:
    backend = installed(name)
    peaks = []
    for length in (2048, 8192):
        call = replace(make_call(torch.bfloat16, length, batch=1), is_causal=is_causal)
        lack = backend.lacks(call)
        if lack is not None:
            pytest.skip(lack)
        torch._dynamo.reset()
        peaks.append(peak_bytes(lambda call=call: results(call, attend(call, backend))))
    assert peaks[1] < 6 * peaks[0]  # four times; sixteen if it were the square


@pytest.mark.needs_kernels("a fused kernel keeps no scores")
def test_the_peak_of_a_fused_module_grows_with_the_length_and_that_of_the_original_with_its_square() -> None:
    module = FOUND["at_sign"]().to(DEVICE)
    lengths = (1024, 4096)

    def peaks() -> list[int]:
        inputs = [torch.randn(2, length, 32, device=DEVICE) for length in lengths]
        return [peak_bytes(lambda x=x: module_results(module, x)) for x in inputs]

    plain = peaks()
    handle = fused(module, torch.randn(2, lengths[0], 32, device=DEVICE))
    now = peaks()
    handle.undo()
    assert plain[1] > 12 * plain[0]
    assert now[1] < 6 * now[0]
    assert now[1] < plain[1] / 10
