"""Random numbers that a user's code draws for what a layout might move, in places that are no module's forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accel import AccelPlugin
from support.edges import Net, run

pytestmark = pytest.mark.numbers


class AddsNoiseToGradients(Net):
    """As Langevin dynamics do, between the backward pass and the optimizer's step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)
        optimizer.step()


class MovesWeights(Net):
    """By a hook of the optimizer."""

    def on_fit_start(self) -> None:
        self.trainer.optimizers[0].register_step_post_hook(lambda *_: self.move())

    @torch.no_grad()
    def move(self) -> None:
        for parameter in self.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class DrawsForTransposed(Net):
    """The tensor is the user's own, and lies so in a plain run."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x + 0.1 * torch.randn_like(x.transpose(1, 3)).transpose(1, 3))


class DrawsForTokens(Net):
    """In a plain run, a sequence made of an image is not contiguous. Of one in channels_last, it is."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x + 0.1 * torch.randn_like(x))
        if len(self.losses) < 5:
            return features
        tokens = features.flatten(2).transpose(1, 2)
        return (tokens + 0.1 * torch.randn_like(tokens)).transpose(1, 2).unflatten(2, features.shape[2:])


@pytest.mark.parametrize("kind", [AddsNoiseToGradients, MovesWeights, DrawsForTransposed, DrawsForTokens])
def test_they_are_those_of_a_plain_run(kind: type[Net]) -> None:
    plain = run(kind, None)
    state = torch.get_rng_state()
    plugin = AccelPlugin(precision="32-true", report=False, trust="checked")
    model = run(kind, plugin)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model.losses, plain.losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [AddsNoiseToGradients, MovesWeights])
def test_noise_after_the_backward_pass_leaves_the_layout_on(kind: type[Net]) -> None:
    plugin = AccelPlugin(precision="32-true", report=False, trust="checked")
    run(kind, plugin)
    assert plugin.report.of("memory_format").is_on
