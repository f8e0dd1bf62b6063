"""Modules in the style of timm, which carry a switch between their own attention and torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.techniques.flash_attention.backends import BACKENDS
from lightning_accel.techniques.flash_attention.sites import FusedAttnSite, find_fused_attn
from lightning_accel.techniques.site import Site

pytestmark = pytest.mark.numbers


class SwitchedAttention(nn.Module):
    """Self-attention with a switch: (B, T, D) → (B, T, D)."""

    def __init__(self, dim: int = 16, num_heads: int = 2, fused_attn: Any = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.fused_attn = fused_attn
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout)
        else:
            scores = q * self.scale @ k.transpose(-2, -1)
            scores = scores if attn_mask is None else scores + attn_mask
            out = self.attn_drop(scores.softmax(dim=-1)) @ v
        return self.proj(out.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, fused_attn: Any = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attn = SwitchedAttention(fused_attn=fused_attn)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Unrelated(nn.Module):
    """Has an attribute of that name, of which its forward takes no notice."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_attn = False
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def only_site(model: nn.Module) -> FusedAttnSite:
    (site,) = find_fused_attn(model)
    assert isinstance(site, FusedAttnSite)
    return site


def test_switches_that_are_off_are_found_and_those_that_are_on_refused() -> None:
    model = nn.Sequential(Block(), Block(fused_attn=True), Unrelated(), Block(fused_attn=torch.tensor(False)))

    off, on, inner = find_fused_attn(model)

    assert isinstance(off, FusedAttnSite)
    assert (off.site, off.what) == ("0.attn", "fused_attn switch")
    assert isinstance(on, Site)
    assert on.site == "1.attn"
    assert "fused already" in on.why_not
    assert isinstance(inner, FusedAttnSite)
    assert inner.site == "2.inner.attn"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "flash"])
def test_outputs_and_gradients_are_the_modules_own(backend: str, masked: bool) -> None:
    model = Block()
    site = only_site(model)
    forward = SwitchedAttention.forward
    kwargs = {"attn_mask": torch.randn(1, 2, 5, 5)} if masked else {}
    results = []
    for fused in (False, True):
        x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
        model.zero_grad()
        out = site.run(BACKENDS[backend], forward, (x,), kwargs) if fused else forward(model.attn, x, **kwargs)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in model.attn.parameters())])

    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert model.attn.fused_attn is False


@pytest.mark.parametrize("name", list(BACKENDS))
def test_torchs_own_kernels_come_first_by_their_name_and_others_leave_the_choice_to_torch(name: str) -> None:
    from torch.nn.attention import _cur_sdpa_kernel_backends

    site = only_site(Block())
    seen: list[Any] = []

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        assert module.fused_attn is True
        seen.extend(_cur_sdpa_kernel_backends(with_priority=True))
        return x

    before = _cur_sdpa_kernel_backends(with_priority=True)
    site.run(BACKENDS[name], forward, (torch.zeros(1),), {})

    first = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}.get(name)
    if first is None:
        assert seen == before
    else:
        assert seen[0].name == first
        assert {each.name for each in seen} >= {"MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"}
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_an_exception_restores_the_switch() -> None:
    site = only_site(Block())

    def forward(module: nn.Module) -> None:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        site.run(BACKENDS["flash"], forward, (), {})

    assert site.module.fused_attn is False


def test_a_hook_on_one_of_its_parts_sees_it_called() -> None:
    model, seen = Block(), []
    model.attn.attn_drop.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    site = only_site(model)

    site.run(BACKENDS["sdpa"], SwitchedAttention.forward, (torch.randn(3, 5, 16),), {})

    assert seen == [(3, 2, 5, 5)]
    assert "hook on its parts" in str(site.nothing_found())


def test_training_ends_at_the_same_weights() -> None:
    models = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Block()
        site = only_site(model)
        if fused:
            model.attn.forward = lambda *args, site=site: site.run(
                BACKENDS["sdpa"], SwitchedAttention.forward, args, {}
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))).square().mean().backward()
            optimizer.step()
        models.append(model.state_dict())

    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-5, atol=1e-6)
