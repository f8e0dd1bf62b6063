"""Graph mode on matmul + transpose + activation, 128x256 by 512x256.

Claimed: +33%
Holds: compiled code starts fewer kernels, and skips Python and the dispatcher between them
Holds when: what a graph saves, dispatch and a pass over memory, is a third of the time only in some of these; the
    product is the same library's kernel in all of them
No longer holds: eagerly, the product takes most of the time, and is the same library's kernel in a graph; what is
    generated for the rest gains less than a third of it all, or is slower than torch's own kernels
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.claims.claim import Figure, Missing, Target, claim_in
from lightning_accel.claims.measure import NOTHING_ELSE, device, speedup, timed_ms, without_gradients
from lightning_accel.core.host import Host

CLAIM = claim_in(__doc__, row=1)

BLOCKS = 4
_TARGET = Target("at least", 1.33)


class Block(nn.Module):
    """The claim's three operations: (128, 256) → (512, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(256, 512, bias=False)  # x @ weight.t(), with a weight of 512x256
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.product(x).t())
        return out


class Branches(nn.Module):
    """Blocks side by side, each on the same (128, 256): every one of them has the size that was claimed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [block(x) for block in self.blocks]


def measure() -> Iterator[Figure | Missing]:
    torch.manual_seed(0)
    x = torch.randn(128, 256, device=device())
    eager = Branches().to(device())
    script = torch.jit.freeze(torch.jit.script(Branches().to(device()).eval()))
    times = timed_ms({"eager": without_gradients(eager, x), "script": without_gradients(script, x)}, seconds=3)
    yield speedup("by TorchScript, in inference", times["eager"], times["script"], _TARGET)
    if Host.detect(device()).compiler is None:
        yield Missing("by torch.compile", "nothing to compile with: `lightning-accel doctor` names what to install")
        return
    torch._dynamo.reset()  # its limit on versions of one function counts those of earlier rows too
    compiled = Branches().to(device())
    handle = compiled_by_plan(compiled, x)
    for name, run in (("in inference", without_gradients), ("in training", training)):
        sides = {"eager": run(eager, x), "compiled": run(compiled, x)}
        sides["compiled"]()  # without gradients it is compiled anew
        with torch.compiler.set_stance("fail_on_recompile"):  # else it might go on eagerly, unseen
            times = timed_ms(sides, seconds=3)
        yield speedup(f"by torch.compile, {name}", times["eager"], times["compiled"], _TARGET)
    handle.undo()


def compiled_by_plan(model: nn.Module, x: Tensor) -> AcceleratedModel:
    """Compiles the blocks of ``model`` as a plan does, by trial on its second training step."""
    handle = accelerate(model, Plan(precision="32-true", compile="on", techniques=NOTHING_ELSE, strict=True))
    step = training(model, x)
    for _ in range(2):
        with handle.step():
            step()
    assert len(handle.report.applied("compile")) == BLOCKS, handle.report.to_text()
    return handle


def training(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward, each output with a gradient of ones; no gradient is left."""

    def run() -> None:
        outputs = model(x)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        model.zero_grad()

    return run
