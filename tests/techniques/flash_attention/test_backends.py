"""The backends of flash attention: which there are on a host, and what the others say of the way to get them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention
from torch.nn import functional as F

from lightning_accel import AccelError, AccelWarning, Host
from lightning_accel.techniques.flash_attention.backends import BACKENDS, Backend, installed_backends
from lightning_accel.techniques.flash_attention.call import AttentionCall, sdpa
from lightning_accel.techniques.flash_attention.settings import FlashAttentionSetting
from support.attention_zoo import FOUND
from support.techniques.flash_attention.technique_runs import Stack, start

pytestmark = pytest.mark.numbers


def test_the_plan_names_every_backend() -> None:
    assert set(get_args(FlashAttentionSetting)) == {"auto", "off", *BACKENDS}


@pytest.mark.parametrize(
    ("backend", "mend"),
    [("flash-attn", "runs on NVIDIA"), ("fa3", "use 'sdpa'"), ("flex", "use 'sdpa'"), ("cudnn", "no cudnn attention")],
)
def test_a_backend_that_is_not_here_is_a_warning_that_names_those_that_are(backend: str, mend: str) -> None:
    with pytest.warns(
        AccelWarning, match=rf"flash_attention: backend '{backend}': .*{mend}.*Here there are: sdpa, flash"
    ):
        start(Stack(FOUND["at_sign"]), backend).undo()
    with pytest.raises(AccelError):
        start(Stack(FOUND["at_sign"]), backend, strict=True)


OLD = Host(kind="cuda", device_name="Tesla T4", capability=(7, 5))
NEW = Host(kind="cuda", device_name="H200", capability=(9, 0), native_bf16=True, compiler="triton")


def test_a_gpu_that_is_too_old_is_told_so() -> None:
    reason = BACKENDS["flash"].unavailable(OLD)
    assert reason == "Tesla T4 is too old for it: compute capability 7.5, 8.0 is needed; use 'sdpa'"


@pytest.mark.parametrize(
    ("backend", "mend"),
    [
        ("flash-attn", "pip install 'lightning-accel[flash]'"),
        ("fa3", "github.com/Dao-AILab/flash-attention"),
        ("fa4", "pip install flash-attn-4"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(backend: str, mend: str) -> None:
    assert mend in (BACKENDS[backend].unavailable(NEW) or "")
    assert BACKENDS[backend].unavailable(dataclasses.replace(NEW, kernels=frozenset({backend}))) is None


AMD = Host(kind="rocm", device_name="MI300X", arch="gfx942", native_bf16=True, compiler="triton")


@pytest.mark.parametrize(
    ("arch", "found"),
    [
        ("gfx942", ["sdpa", "flash", "efficient", "flex"]),
        ("gfx1100", ["sdpa", "flash", "efficient", "flex"]),
        ("gfx1151", ["sdpa", "flash", "efficient", "flex"]),  # experimental: torch says so of each call
        ("gfx1030", ["sdpa", "flex"]),
        ("", ["sdpa", "flash", "efficient", "flex"]),  # not known: torch is asked when it is tried
    ],
)
def test_on_amd_cards_there_are_the_kernels_that_torch_has_for_the_architecture(arch: str, found: list[str]) -> None:
    host = dataclasses.replace(AMD, arch=arch)
    assert [backend.name for backend in installed_backends(host)] == found


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("cudnn", "MI300X is AMD's"), ("fa3", "MI300X is AMD's"), ("fa4", "is AMD's"), ("flash-attn", "for ROCm")],
)
def test_on_amd_cards_the_others_say_why_not(backend: str, reason: str) -> None:
    assert reason in (BACKENDS[backend].unavailable(AMD) or "")


# -- flash-attn, whose kernel is written out here ------------------------------------------------------------------


def varlen(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *_: Any, **options: Any) -> Tensor:
    """As the kernel: it computes from start to start, and leaves the gradients of what lies behind the last unwritten.

    Tensors are (sum of lengths, H, D).
    """

    def unwritten(gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, torch.arange(int(starts_k[-1]), len(gradient)), math.nan)

    for tensor in (k, v):
        tensor.register_hook(unwritten)  # type: ignore[no-untyped-call]
    spans = zip(*(itertools.pairwise(one.tolist()) for one in (starts_q, starts_k)), strict=True)
    samples = ((q[slice(*rows)], k[slice(*columns)], v[slice(*columns)]) for rows, columns in spans)
    outputs = [F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in sample)) for sample in samples]
    return torch.cat([out.transpose(0, 1) for out in outputs])


def simulated(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> Backend:
    package = SimpleNamespace(flash_attn_func=None, flash_attn_varlen_func=kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", package)  # type: ignore[arg-type]
    return BACKENDS["flash-attn"]


def test_flash_attn_with_padding_gives_values_and_gradients_of_masked_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 0, 0, 1, 0]], dtype=torch.bool)
    q, k, v = (torch.randn(3, 2, 5, 8, requires_grad=True) for _ in range(3))
    call = AttentionCall(query=q, key=k, value=v, mask=real[:, None, None])
    found, expected = simulated(monkeypatch, varlen)(call), sdpa(call)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(out, (q, k, v), weights) for out in (found, expected)))


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_flash_attn_is_told_of_deterministic_algorithms(
    monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
) -> None:
    told: list[bool] = []

    def kernel(*tensors: Tensor, deterministic: bool, **options: Any) -> Tensor:
        told.append(deterministic)
        return varlen(*tensors, **options)

    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    call = AttentionCall(query=q, key=k, value=v, mask=torch.ones(1, 1, 1, 5, dtype=torch.bool))
    backend = simulated(monkeypatch, kernel)
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        backend(call)
    finally:
        torch.use_deterministic_algorithms(False)
    assert told == [is_deterministic]


def test_flash_attention_3_is_active_in_its_forward_and_its_backward_pass_and_at_no_other_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On torch's own kernel of the CPU: what is recorded is when torch is told to use another implementation."""
    happened: list[str | None] = [None]
    active = SimpleNamespace(name=None)

    def activate(name: str | None) -> None:
        active.name = name
        happened.append(name)

    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: active.name)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: activate(None))
    q, k, v = torch.randn(3, 2, 4, 16, 32).requires_grad_().unbind()
    out = BACKENDS["fa3"](AttentionCall(query=q, key=k, value=v))
    out.register_hook(lambda _: happened.append("the output's gradient"))
    q.register_hook(lambda _: happened.append("the query's gradient"))
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    backward = ["the output's gradient", "FA3", None, "the query's gradient"]
    assert happened == [None, "FA3", None, *backward, *backward]


def test_flash_attn_with_padding_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without values, as here, says how large it is only where nobody needs to count first."""
    backend = simulated(monkeypatch, lambda q, *_, **options: torch.empty_like(q))
    with FakeTensorMode():
        q, k, v = (torch.empty(3, 2, 5, 8, dtype=torch.bfloat16) for _ in range(3))
        mask = torch.empty(3, 1, 1, 5, dtype=torch.bool)
        out = backend(AttentionCall(query=q, key=k, value=v, mask=mask))
    assert out.shape == q.shape
