"""What techniques can do for a run that has run out of memory, and how they are put on in mid-run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel, NamedFallback, build_context, fallbacks_for
from lightning_accel.core.host import Host
from lightning_accel.core.tree import unique_bytes
from lightning_accel.techniques.base import BuildContext

pytestmark = pytest.mark.numbers

QUIET: dict[str, Any] = {"precision": "32-true", "flash_attention": "off", "memory_format": "off", "trust": "checked"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.act(self.up(x))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(8, 1))


def around(model: nn.Module, device: str = "cpu", **settings: Any) -> BuildContext:
    host = Host(kind="cuda" if device == "cuda" else "cpu", device_name="simulated")
    return build_context(Plan().replace(**{**QUIET, **settings}), model, host, device=torch.device(device))


def offered(model: nn.Module, device: str = "cpu", **settings: Any) -> list[tuple[str, Any]]:
    return [(one.name, one.settings) for one in fallbacks_for(around(model, device, **settings))]


PACKING, SELECTIVE, FULL = (
    ("sparse_activations", "auto"),
    ("gradient_checkpointing", "selective"),
    ("gradient_checkpointing", "full"),
)
OFFLOADING = ("activation_offloading", "host")


def test_what_costs_the_least_time_comes_first_and_offloading_on_gpus_only() -> None:
    assert offered(net()) == [PACKING, SELECTIVE, FULL]
    assert offered(net(), "cuda") == [PACKING, SELECTIVE, OFFLOADING, FULL]


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"sparse_activations": "auto"}, [SELECTIVE, OFFLOADING, FULL]),
        ({"gradient_checkpointing": "selective"}, [PACKING, OFFLOADING, FULL]),
        ({"gradient_checkpointing": "full"}, [PACKING, OFFLOADING]),
        ({"activation_offloading": "off"}, [PACKING, SELECTIVE, FULL]),
        ({"memory_budget": "12GiB"}, [PACKING]),
    ],
)
def test_what_the_run_has_or_was_forbidden_is_not_offered(settings: dict[str, Any], left: list[Any]) -> None:
    assert offered(net(), "cuda", **settings) == left


def test_the_users_own_blocks_are_those_that_are_checkpointed_in_full() -> None:
    settings = {"mode": "selective", "blocks": ["Block"]}
    assert offered(net(), gradient_checkpointing=settings)[-1] == (
        "gradient_checkpointing",
        {"mode": "full", "blocks": ["Block"]},
    )


def test_a_model_without_blocks_or_zeros_is_offered_nothing() -> None:
    assert offered(nn.Linear(8, 1)) == []


def test_compiled_blocks_are_left_for_the_next_run() -> None:
    found = {one.name: one.fallback.only_anew for one in fallbacks_for(around(net(), compile="on"))}
    assert found["gradient_checkpointing"] == "the blocks are compiled as they are"


# -- put on in mid-run --------------------------------------------------------------------------------------------


class Run:
    """A plain loop, whose engine is at hand."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.handle: AcceleratedModel = accelerate(
            model, Plan().replace(**{**QUIET, **settings}), optimizers=self.optimizer
        )
        self.around = around(model, **settings)
        self.saved_bytes = 0

    def step(self, at: int) -> float:
        torch.manual_seed(at)
        kept: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with self.handle.step(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(torch.randn(64, 8)).square().mean()
        self.saved_bytes = unique_bytes(kept)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def put_on(self, *wanted: Any) -> None:
        (named,) = (one for one in fallbacks_for(self.around) if (one.name, one.settings) == wanted)
        self.add(named)

    def add(self, named: NamedFallback) -> None:
        technique = named.make(self.around)
        assert technique is not None
        assert self.handle.engine.add(technique)


@pytest.mark.parametrize("at", [0, 4], ids=["before the trial steps", "after them"])
@pytest.mark.parametrize("fallback", [PACKING, SELECTIVE, FULL], ids=["packing", "selective", "full"])
def test_it_changes_no_number_whenever_it_comes(fallback: Any, at: int) -> None:
    plain, run = Run(net(), inplace_activations="off"), Run(net(), inplace_activations="off")
    for step in range(6):
        if step == at:
            run.put_on(*fallback)
        assert run.step(step) == plain.step(step)


@pytest.mark.parametrize("fallback", [SELECTIVE, FULL], ids=["selective", "full"])
def test_less_is_kept_for_the_backward_pass(fallback: Any) -> None:
    run = Run(net())
    for step in range(4):
        run.step(step)
    before = run.saved_bytes
    run.put_on(*fallback)
    run.step(4)  # in which it is tried
    run.step(5)
    assert run.saved_bytes < before / (1 if fallback == SELECTIVE else 3)


def test_one_mode_takes_the_place_of_the_other() -> None:
    run = Run(net())
    run.step(0)
    run.put_on(*SELECTIVE)
    run.step(1)
    run.put_on(*FULL)
    run.step(2)
    changes = run.handle.report.of("gradient_checkpointing").changes
    assert set(changes.values()) == {"forward → checkpointed (full)"}


def test_what_was_put_on_is_undone_with_the_rest() -> None:
    model = net()
    run = Run(model)
    run.step(0)
    run.put_on(*FULL)
    run.step(1)
    run.handle.undo()
    assert not any("forward" in vars(module) for module in model.modules())
    assert copy.deepcopy(model).state_dict().keys() == net().state_dict().keys()


def test_what_was_put_on_can_be_taken_back_alone() -> None:
    run = Run(net())
    run.step(0)
    run.put_on(*FULL)
    run.handle.engine.withdraw("gradient_checkpointing", "it did not help")
    assert not any("forward" in vars(module) for module in run.model)
    assert run.handle.report.of("gradient_checkpointing").status == "taken back: it did not help"
    run.step(1)


def test_activations_in_checkpointed_blocks_stay_out_of_place() -> None:
    run = Run(net())
    run.step(0)
    run.put_on(*FULL)
    assert set(run.handle.report.refused("inplace_activations").values()) == {
        "inside a checkpointed block, whose activations do not last anyway"
    }


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_block_that_a_second_run_would_change_is_found_out_in_mid_run_too() -> None:
    model = nn.Sequential(*(Counts() for _ in range(3)))
    run = Run(model)
    for step in range(3):
        run.step(step)
    run.put_on(*FULL)
    run.step(3)
    assert [float(block.calls) for block in model] == [4.0] * 3
    assert set(run.handle.report.refused("gradient_checkpointing").values()) == {
        "its forward changes 'calls', which recomputing would change again"
    }
