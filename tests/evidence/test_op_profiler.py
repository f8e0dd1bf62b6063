"""One step taken apart: whose its time, FLOPs, memory and copies are, and that looking leaves it as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_accel.core.clocks import HostClock, clock_for
from lightning_accel.core.torch_private.modules import hooks_on_all_modules
from lightning_accel.evidence.flops import FlopMode
from lightning_accel.evidence.op_profiler import AnatomyMode
from lightning_accel.evidence.step_breakdown import (
    ACTIVATIONS,
    BATCH,
    COPIES,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    STATES,
    WITHIN,
    Anatomy,
    MemoryPeaked,
)
from lightning_accel.memory.meter import meter_for

ROWS, DIM, WIDE = 64, 32, 128


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(DIM, WIDE), nn.GELU(), nn.Linear(WIDE, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Feed(), Feed()])
        self.head = nn.Linear(DIM, 10)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        if self._forward is not None:
            return self._forward(self, x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Training:
    """Steps of a model, the first of which have made gradients and optimizer states."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean()) -> None:
        self.net, self.loss = net, loss
        self.batch = torch.randn(ROWS, DIM, device=next(net.parameters()).device)
        self.optimizer = torch.optim.AdamW(net.parameters())
        self.is_stepping = False
        for _ in range(2):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.net(self.batch)).backward()
        self.is_stepping = True
        self.optimizer.step()
        self.is_stepping = False

    def taken_apart(self, *, meters: bool = False) -> tuple[Anatomy, MemoryPeaked]:
        mode = AnatomyMode(self.net, HostClock(), lambda: self.is_stepping, meters=meters)
        mode.begin(self.batch, [self.optimizer])
        with mode:
            self.step()
        return mode.taken([self.optimizer])


def test_flops_of_modules_add_up_to_those_of_the_step() -> None:
    training = Training(Net())
    with FlopMode() as whole:
        training.step()
    found, _ = training.taken_apart()
    assert sum(one.flops for one in found.modules) == whole.flops > 0
    flops = {one.module: one.flops for one in found.modules}
    # Forward, and both gradients; of the first layer of all the input needs none.
    assert flops["blocks.1.up"] == 3 * 2 * ROWS * DIM * WIDE
    assert flops["blocks.0.up"] == 2 * 2 * ROWS * DIM * WIDE


def test_every_module_has_its_own_operations_forward_and_backward() -> None:
    costs = {one.module: one for one in Training(Net()).taken_apart()[0].modules}
    layers = {f"blocks.{block}.{part}" for block in range(2) for part in ("up", "act", "down")}
    assert costs.keys() == {*layers, "blocks.0", "blocks.1", "head", "", OPTIMIZER}
    assert costs["blocks.0.act"].kind == "GELU"
    assert all(costs[layer].forward_ms > 0 and costs[layer].backward_ms > 0 for layer in layers)


def test_a_checkpointed_block_is_told_too() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return net.head(x)

    costs = {one.module: one for one in Training(Net(forward)).taken_apart()[0].modules}
    assert costs["blocks.1.up"].flops == 3 * 2 * ROWS * DIM * WIDE  # what is repeated is no more of the model's


def test_memory_at_the_peak_is_what_the_allocator_says() -> None:
    training = Training(Net())
    _, found = training.taken_apart()
    states = [tensor for state in training.optimizer.state.values() for tensor in state.values()]
    held = [*training.net.parameters(), *states, training.batch]
    training.optimizer.zero_grad()  # which a step does first of all
    meter = meter_for(torch.device("cpu"))
    meter.start(held)
    training.step()
    assert found.peak_bytes == pytest.approx(max(one.peak_bytes for one in meter.stop()), rel=0.03)


@pytest.mark.parametrize("net", [Net, lambda: nn.LSTM(DIM, WIDE)], ids=["linear layers", "kernels with workspaces"])
def test_with_the_allocator_metered_it_is_its_own_peak(net: Callable[[], nn.Module]) -> None:
    def loss(y: Any) -> Tensor:
        return (y[0] if isinstance(y, tuple) else y).square().mean()

    training = Training(net(), loss)
    metered, alone = (training.taken_apart(meters=meters)[1] for meters in (True, False))
    assert metered.peak_bytes == alone.peak_bytes + metered.parts.get(WITHIN, 0)
    assert sum(metered.parts.values()) == metered.peak_bytes


def test_beside_another_profiler_the_allocator_is_not_metered() -> None:
    training = Training(Net())
    with torch.profiler.profile():
        _, found = training.taken_apart(meters=True)
    assert WITHIN not in found.parts


def test_categories_add_up_to_the_peak_and_are_what_they_are_called() -> None:
    training = Training(Net())
    _, memory = training.taken_apart()
    assert sum(memory.parts.values()) == memory.peak_bytes
    parameters = sum(4 * p.numel() for p in training.net.parameters())
    steps = 4 * len(list(training.net.parameters()))  # AdamW counts its own, for each
    assert memory.parts[PARAMETERS] == parameters
    assert memory.parts[STATES] == 2 * parameters + steps
    assert memory.parts[BATCH] == 4 * ROWS * DIM
    assert memory.parts[ACTIVATIONS] >= 4 * 4 * ROWS * WIDE  # of both blocks, before and after their GELU
    assert 0 < memory.parts.get(GRADIENTS, 0) <= parameters


def test_logits_are_told_from_other_activations() -> None:
    classes = 4096
    training = Training(nn.Linear(DIM, classes), lambda y: F.cross_entropy(y, torch.zeros(ROWS, dtype=torch.long)))
    _, memory = training.taken_apart()
    assert memory.parts[LOGITS] >= 2 * 4 * ROWS * classes  # and their log-softmax


def test_copies_of_parameters_that_autocast_makes_are_told() -> None:
    training = Training(Net())
    with torch.autocast("cpu", torch.bfloat16):
        found, memory = training.taken_apart()
    assert memory.parts[COPIES] >= 2 * 2 * DIM * WIDE
    low = {one.module: one.low_precision_flops for one in found.modules}
    assert low["blocks.1.up"] == 3 * 2 * ROWS * DIM * WIDE


def test_a_copy_that_mends_strides_is_told_with_both_lines() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        turned = x.t()
        return net.head((turned.contiguous() * 2).t())

    training = Training(Net(forward))
    training.batch = torch.randn(4 * ROWS, DIM)
    copy, *others = training.taken_apart()[0].copies
    assert copy.made_by.startswith("t at ")
    assert "test_op_profiler.py" in copy.made_by
    assert "test_op_profiler.py" in copy.line
    assert copy.moved_bytes == 4 * 4 * ROWS * DIM
    assert (copy.count, [other for other in others if other.line]) == (1, [])


def test_lines_that_ask_for_numbers_are_told() -> None:
    def loss(y: Tensor) -> Tensor:
        result = y.square().mean()
        result.item()
        return result

    waits = Training(Net(), loss).taken_apart()[0].waits
    ((line, count),) = waits.items()
    assert count == 1
    assert line.endswith("in loss")


def test_it_leaves_no_hook_behind_and_computes_the_same() -> None:
    torch.manual_seed(0)
    watched = Training(Net())
    torch.manual_seed(0)
    plain = Training(Net())
    watched.taken_apart()
    plain.step()
    assert hooks_on_all_modules() == []
    assert all(map(torch.equal, watched.net.parameters(), plain.net.parameters()))


def test_a_step_that_raises_leaves_no_hook_behind() -> None:
    def loss(y: Tensor) -> Tensor:
        raise ValueError("a bad sample")

    training = Training(Net())
    training.loss = loss
    with pytest.raises(ValueError, match="a bad sample"):
        training.taken_apart()
    assert hooks_on_all_modules() == []


def test_what_cannot_be_looked_at_costs_the_look_and_not_the_count_of_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(Net())
    mode = AnatomyMode(training.net, HostClock(), lambda: False)

    def stumbles(*args: Any) -> None:
        raise TypeError("no such tensor")

    monkeypatch.setattr(mode, "_note", stumbles)
    with mode:
        training.step()
    assert mode.failure is None
    assert mode.flops > 0
    with pytest.raises(TypeError, match="no such tensor"):
        mode.taken([])


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_the_allocators_and_every_operation_is_timed() -> None:
    device = torch.device("cuda")
    training = Training(Net().to(device))
    states = [tensor for state in training.optimizer.state.values() for tensor in state.values()]
    gradients = [p.grad for p in training.net.parameters() if p.grad is not None]
    known = sum(t.nbytes for t in [*training.net.parameters(), *gradients, *states, training.batch] if t.is_cuda)
    outside = torch.cuda.memory_allocated(device) - known  # what others hold, and what is left over of blocks
    del gradients
    torch.cuda.reset_peak_memory_stats(device)
    mode = AnatomyMode(training.net, clock_for(device), lambda: training.is_stepping)
    mode.begin(training.batch, [training.optimizer])
    with mode:
        training.step()
    found, memory = mode.taken([training.optimizer])
    assert memory.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(device) - outside, rel=0.1)
    assert all(one.forward_ms + one.backward_ms > 0 for one in found.modules)
