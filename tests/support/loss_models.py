"""Small language models in every common spelling of head and loss, and a way to train two of them side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel import AcceleratedModel, Plan, accelerate
from lightning_accel.core.torch_private.modes import DispatchMode
from lightning_accel.techniques.loss import Loss

VOCABULARY, WIDTH, SAMPLES, LENGTH = 96, 8, 4, 12
TOKENS = SAMPLES * LENGTH
Step = Callable[[nn.Module, Tensor], Tensor]


class LanguageModel(nn.Module):
    """Tokens (B, T) → logits (B, T, V)."""

    def __init__(self, *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(tokens)))
        return logits


def loss_of_all(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss as nanoGPT has it."""
    logits = model(tokens)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), tokens.roll(-1, 1).view(-1))


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(steps)]


@dataclass
class Run:
    """What a training left."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    num_fused: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    applied: list[Any] = field(default_factory=list)


def start(model: nn.Module, **settings: Any) -> AcceleratedModel:
    """A handle with nothing but the technique."""
    off = {"precision": "32-true", "flash_attention": "off", "inplace_activations": "off", "memory_format": "off"}
    return accelerate(model, Plan().replace(**{**off, "trust": "checked", **settings}))


def of_handle(handle: AcceleratedModel) -> Loss:
    found = handle.engine.technique(Loss)
    assert found is not None
    return found


def train(model: nn.Module, step: Step, *, steps: int = 3, setting: str | None = "auto", **settings: Any) -> Run:
    """Trains, with the technique or (None) plainly."""
    run = Run()
    handle = start(model, loss=setting, **settings) if setting is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for tokens in batches(steps):
        optimizer.zero_grad()
        with nullcontext() if handle is None else handle.step():
            loss = step(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        run.losses.append(loss.detach())
        run.gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    if handle is not None:
        heads = of_handle(handle).heads.values()
        run.num_fused = sum(head.num_fused for head in heads)
        run.refused = dict(handle.report.refused("loss"))
        run.applied = list(handle.report.applied("loss"))
        handle.undo()
    return run


def side_by_side(model: nn.Module, step: Step, *, steps: int = 3, **settings: Any) -> Run:
    """Trains with the technique, and holds in float64 that a plain run has the same losses and gradients."""
    model = model.double()
    twin = copy.deepcopy(model)
    expected, actual = train(twin, step, steps=steps, setting=None), train(model, step, steps=steps, **settings)
    for want, got in zip((*expected.losses, *expected.gradients), (*actual.losses, *actual.gradients), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14, equal_nan=True)
    return actual


class Largest(DispatchMode):
    """Watches how large a tensor any operation makes, and counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.elements = max(self.elements, tensor.numel())
        self.num_products += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        return made


@contextmanager
def watched() -> Iterator[Largest]:
    with Largest() as largest:
        yield largest
