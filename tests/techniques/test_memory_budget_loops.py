"""A budget holds in every kind of training loop, and what gets in its way is said and harms nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile, schedule
from torch.utils.checkpoint import checkpoint

from lightning_accel import AccelWarning, Plan, accelerate
from lightning_accel.memory.planner import MAX_WAITING_STEPS
from lightning_accel.memory.schedule import FixedMemory
from support.models import TASKS, Task
from support.techniques.memory_budget_cases import (
    PLAIN,
    SETTLED,
    Block,
    Loop,
    Stack,
    budget,
    handles_are_undone,
    peak_of,
    plain,
)

pytestmark = pytest.mark.numbers

__all__ = ["handles_are_undone", "plain"]


# -- other ways to train ---------------------------------------------------------------------------------------------


def test_gradients_that_are_alive_during_the_forward_pass_are_part_of_the_peak() -> None:
    """Lightning drops them after it: the same model then needs more, and the planner has seen it."""
    peaks = []
    for drops_late in (False, True):
        loop = Loop(Stack(), "1GiB")
        for _ in range(SETTLED):
            with loop.handle.step():
                loss = loop.model(torch.randn(64, 32)).square().mean()
                if drops_late:
                    loop.optimizer.zero_grad()
            loss.backward()
            loop.optimizer.step()
            if not drops_late:
                loop.optimizer.zero_grad()
        assert loop.plan.measured_peak_bytes is not None
        peaks.append(loop.plan.measured_peak_bytes)
    assert peaks[1] > peaks[0]


def test_accumulation_is_planned_on_the_step_that_holds_all_gradients() -> None:
    loop = Loop(Stack(), "1GiB")
    for index in range(24):
        with loop.handle.step():
            loss = loop.model(torch.randn(64, 32)).square().mean()
        loss.backward()
        if index % 4 == 3:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert loop.plan.measured_peak_bytes is not None
    assert loop.plan.fixed.optimizer > 0


def test_a_block_that_is_called_twice_goes_one_way(plain: tuple[int, int]) -> None:
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    torch.manual_seed(1)
    model = Twice(blocks=3)
    twin = copy.deepcopy(model)
    loop = Loop(model, budget(plain, 0.6))
    assert loop.run(SETTLED) == Loop(twin).run(SETTLED)
    assert loop.peak_bytes() <= budget(plain, 0.6)
    assert [block.call for block in loop.plan.blocks][3:] == [f"blocks.{i} (call 2)" for i in range(3)]


def test_two_backward_passes_a_step_share_the_budget() -> None:
    """As in a GAN: the second pass begins with nothing held."""
    torch.manual_seed(1)
    model = Stack()
    twin = copy.deepcopy(model)
    losses: list[list[float]] = []
    for network, settings in ((model, {"memory_budget": "700KiB"}), (twin, {})):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        handle = accelerate(network, Plan().replace(**{**PLAIN, **settings}))
        losses.append([])
        for index in range(SETTLED):
            torch.manual_seed(index)
            with handle.step():
                for _ in range(2):
                    loss = network(torch.randn(64, 32)).square().mean()
                    loss.backward()
                    losses[-1].append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
    assert losses[0] == losses[1]


def test_a_checkpoint_of_the_users_around_blocks_finds_the_same_choice_again(plain: tuple[int, int]) -> None:
    class Outer(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(1)
    model = Outer()
    twin = copy.deepcopy(model)
    assert Loop(model, budget(plain, 0.9)).run(SETTLED) == Loop(twin).run(SETTLED)


def test_a_copy_of_the_model_trains_by_itself(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.6))
    loop.run(SETTLED)
    twin = copy.deepcopy(loop.model)
    twin(torch.randn(8, 32)).sum().backward()
    assert twin.blocks[0].up.weight.grad is not None
    assert loop.model.blocks[0].up.weight.grad is None
    assert loop.peak_bytes() <= budget(plain, 0.6)


class TaskLoop:
    """A plain training loop on one of the small models, with dropout or running statistics."""

    def __init__(self, model: nn.Module, task: Task, **settings: Any) -> None:
        self.model, self.task = model, task
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.handle = accelerate(model, Plan().replace(**{**PLAIN, **settings}))

    def step(self, index: int = 0) -> float:
        inputs, targets = self.task.batch(index)
        torch.manual_seed(index)
        with self.handle.step():
            loss = self.task.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@pytest.mark.parametrize("name", TASKS)
def test_models_with_dropout_and_running_statistics_train_the_same(name: str) -> None:
    task = TASKS[name]
    probe = TaskLoop(task.model(), task)
    probe.step()
    fixed = FixedMemory.of(probe.model).total
    asked = round(fixed + 0.85 * (peak_of(probe.step, probe.model, probe.optimizer) - fixed))
    plain = TaskLoop(task.model(), task)
    loop = TaskLoop(task.model(), task, memory_budget=f"{asked}B")
    assert [loop.step(i) for i in range(SETTLED)] == [plain.step(i) for i in range(SETTLED)]
    assert loop.handle.report.applied("memory_budget")
    state = plain.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loop.model.state_dict().items())


@pytest.mark.medium
def test_with_a_disk_smaller_budgets_fit(plain: tuple[int, int]) -> None:
    """Blocks let go of what recomputation needs to begin with, and what lies outside all blocks goes too."""
    disk = {"to": "disk", "min_bytes": 1024}
    with pytest.raises(ValueError, match="does not fit"):
        Loop(Stack(), budget(plain, 0.22)).run(SETTLED)
    torch.manual_seed(1)
    model = Stack()
    twin = copy.deepcopy(model)
    loop = Loop(model, budget(plain, 0.22), activation_offloading=disk)
    assert loop.run(2 * SETTLED) == Loop(twin).run(2 * SETTLED)
    assert loop.peak_bytes() <= budget(plain, 0.22)
    assert loop.plan.offloads_rest or {"offload", "full+offload"} & set(loop.plan.policies.values())
    loop.handle.undo()


# -- what gets in the way --------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_beside_another_profiler_every_block_recomputes_and_a_warning_says_why() -> None:
    loop = Loop(Stack(), "1GiB")
    with profile(), pytest.warns(AccelWarning, match="another profiler is at work"):
        loop.run(MAX_WAITING_STEPS + 2)
    assert loop.handle.memory_schedule is None
    assert "every block recomputes" in loop.handle.report.of("memory_budget").status


def test_a_profiler_that_begins_in_the_midst_of_planning_gets_its_way() -> None:
    loop = Loop(Stack(), "1GiB")
    with profile(schedule=schedule(wait=2, warmup=1, active=2, repeat=1)) as users:
        for _ in range(SETTLED):
            loop.step()
            users.step()
    loop.run(SETTLED)
    assert loop.plan.measured_peak_bytes is not None
    loop.handle.undo()


def test_a_budget_that_no_block_can_help_is_said() -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Counting(), Counting())

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x)

    loop = Loop(Model(), "1GiB")
    with pytest.warns(AccelWarning, match="no block can be recomputed: its forward changes 'calls'"):
        loop.run(2 * SETTLED)
    assert "its forward changes" in loop.handle.report.of("memory_budget").status


def test_sparse_arguments_do_no_harm() -> None:
    """A graph's adjacency has neither strides nor one storage."""

    class Convolving(Block):
        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return super().forward(torch.sparse.mm(adjacency, x))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Convolving() for _ in range(3))
            self.adjacency = torch.eye(256).to_sparse()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, self.adjacency)
            return x

    torch.manual_seed(1)
    model = Network()
    twin = copy.deepcopy(model)
    assert Loop(model, "1GiB", trust="unchecked").run(SETTLED) == Loop(twin).run(SETTLED)


def test_a_validation_between_forward_and_backward_does_not_end_the_step() -> None:
    loop = Loop(Stack(), "1GiB")
    for _ in range(SETTLED):
        with loop.handle.step():
            loss = loop.model(loop.data[:64]).square().mean()
        with torch.no_grad(), loop.handle.step("validate"):
            loop.model(loop.data[:64])
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert loop.plan.measured_peak_bytes is not None


def test_a_graph_that_outlives_its_step_marks_nothing() -> None:
    loop = Loop(Stack(), "1GiB")
    losses = []
    for _ in range(SETTLED):
        with loop.handle.step():
            losses.append(loop.model(loop.data[:64]).square().mean())
        losses[-1].backward(retain_graph=True)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.handle.undo()
    for parameter in loop.model.parameters():
        parameter.grad = None


def test_a_copy_made_in_the_run_trains_after_it(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.22), activation_offloading={"to": "disk", "min_bytes": 1024})
    loop.run(SETTLED)
    twin = copy.deepcopy(loop.model)
    loop.handle.undo()
    twin(torch.randn(256, 32)).sum().backward()
    assert twin.blocks[0].up.weight.grad is not None


@pytest.mark.medium
def test_deterministic_runs_plan_alike(plain: tuple[int, int], determinism_restored: None) -> None:
    torch.use_deterministic_algorithms(True)
    found = []
    for _ in range(3):
        loop = Loop(Stack(), budget(plain, 0.6))
        loop.run(SETTLED)
        found.append(loop.plan.policies)
    assert found[0] == found[1] == found[2]


@pytest.mark.medium
def test_undone_in_the_middle_of_planning_nothing_is_left() -> None:
    for steps in range(SETTLED):
        loop = Loop(Stack(), "1GiB")
        loop.run(steps)
        loop.handle.undo()
        assert not any("forward" in vars(module) for module in loop.model.modules())
        assert not torch.autograd._profiler_enabled()
        loop.step()


def test_a_step_that_raises_while_it_is_metered_is_no_part_of_the_plan() -> None:
    loop = Loop(Stack(), "1GiB")

    def crash() -> None:
        with loop.handle.step():
            loop.model(torch.randn(4, 32))
            raise KeyError("user's bug")

    for index in range(SETTLED + 4):
        if index in (2, 3, 5):
            with pytest.raises(KeyError, match="user's bug"):
                crash()
        loop.step()
    assert loop.plan.measured_peak_bytes is not None


@pytest.mark.medium
def test_two_models_are_planned_side_by_side() -> None:
    loops = [Loop(Stack(), "1GiB"), Loop(Stack(), "1GiB")]
    for _ in range(2 * SETTLED):
        for loop in loops:
            loop.step()
    assert all(loop.plan.measured_peak_bytes for loop in loops)
