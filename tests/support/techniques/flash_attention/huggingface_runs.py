"""How the tests run models of transformers, as they are and with their attention fused, and compare the two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core.patch import MethodPatch, PatchSet
from lightning_accel.techniques.flash_attention.backends import Backend
from lightning_accel.techniques.flash_attention.sites import HuggingFaceSite, find_huggingface, model_switches
from support.huggingface_models import tiny_models
from support.techniques.flash_attention.recorder import Recorder

IS_4 = find_spec("transformers") is not None and version("transformers").startswith("4.")
BY_HAND = frozenset(("bert", "t5") if IS_4 else ())
"""Families whose attention transformers itself computes by hand, in a way that is left to it."""
FAMILIES = sorted(tiny_models().keys() - BY_HAND)
MODES = pytest.mark.parametrize("switched", [False, *[True] * (not IS_4)], ids=["by call", *["switched"] * (not IS_4)])


@pytest.fixture(autouse=True)
def registries_are_as_before() -> Iterator[None]:
    before = registered_names()
    yield
    assert registered_names() == before


def registered_names() -> list[set[str]]:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    return [set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)]


def sites_of(model: nn.Module) -> list[HuggingFaceSite]:
    return [found for found in find_huggingface(model) if isinstance(found, HuggingFaceSite)]


@contextmanager
def fused(model: nn.Module, *, switched: bool = False, backend: Backend | None = None) -> Iterator[Recorder]:
    """The model with every site on ``backend``, bound over forward as the technique does."""
    recording = Recorder()
    patches = PatchSet()
    for site in sites_of(model):

        def wrap(original: Any, site: HuggingFaceSite = site) -> Any:
            def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return site.run(backend or recording, original, args, kwargs)

            return forward

        patches.add(MethodPatch(f"{site.site}.forward", "fused", site.module, "forward", wrap))
    if switched:
        for switch in model_switches(model, {site.site for site in sites_of(model)}):
            patches.add(switch)
    patches.apply()
    try:
        yield recording
    finally:
        patches.undo()


def families(*names: Any) -> pytest.MarkDecorator:
    """Parametrizes a test by families, or by tuples that begin with one: those that have their attention replaced."""
    known = [name for name in names if (name if isinstance(name, str) else name[0]) not in BY_HAND]
    return pytest.mark.parametrize("family" if isinstance(names[0], str) else ("family", "expected"), known)


def make(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    factory, batch = tiny_models()[family]
    torch.manual_seed(0)
    return factory(), batch()


def results(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits, loss and every gradient of one step."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **gradients}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal to what a dozen operations leave, one on top of another, whose longest sums have 64 numbers or so."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        off = 12 * math.sqrt(64) * torch.finfo(value.dtype).eps * max(value.abs().max().item(), 0.1)
        torch.testing.assert_close(actual[name], value, rtol=0, atol=off, msg=lambda m, n=name: f"{n}: {m}")
