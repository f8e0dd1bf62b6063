"""A budget is kept, by the least recomputation that keeps it, and numbers do not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import profile, schedule
from torch.utils.checkpoint import checkpoint

from lightning_accel import AccelWarning, MemoryPlan, OffloadingPlan, Plan, accelerate, plan_memory
from lightning_accel.engine import Engine
from lightning_accel.memory.costs import Way
from lightning_accel.memory.memory_plan import FixedMemory, state_of
from lightning_accel.memory.meter import meter_for
from lightning_accel.memory.planner import MAX_WAITING_STEPS
from models import TASKS, Task, TinyTransformer

SETTLED = 10  # steps after which a plan is found, measured and timed
PLAIN: dict[str, Any] = {
    "precision": "32-true",
    "flash_attention": "off",
    "memory_format": "preserve",
    "inplace_activations": False,
}


class Block(nn.Module):
    """Keeps eleven times its input for the backward pass, in float32: (B, D) → (B, D)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks: int = 6, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


_handles: list[Engine] = []


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    """A step that raised leaves its planner waiting for the next."""
    yield
    while _handles:
        _handles.pop().undo()


class Loop:
    """A plain training loop on a model that is given one batch again and again."""

    def __init__(self, model: nn.Module, budget: Any = None, *, rows: int = 256, **settings: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        checkpointing = {"gradient_checkpointing": {"budget": budget}} if budget else {}
        self.handle: Engine = accelerate(model, Plan(**{**PLAIN, **checkpointing, **settings}))
        _handles.append(self.handle)
        self.rows = rows
        self.data = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))

    def step(self, rows: int | None = None) -> float:
        with self.handle.step():
            loss = self.model(self.data[: rows or self.rows]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def run(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def peak_bytes(self) -> int:
        """The peak of one step: what is there before it, and what the allocator hands out on top."""
        return peak_of(self.step, self.model, self.optimizer)

    @property
    def plan(self) -> MemoryPlan:
        plan = self.handle.memory_plan
        assert plan is not None
        return plan


def peak_of(step: Callable[[], Any], model: nn.Module, optimizer: Optimizer) -> int:
    meter = meter_for(torch.device("cpu"))
    meter.start([*model.parameters(), *model.buffers(), *state_of([optimizer])])
    step()
    return max(interval.peak_bytes for interval in meter.stop())


@pytest.fixture(scope="module")
def plain() -> tuple[int, int]:
    """The peak of a plain step of a stack, and how much of it is not activations."""
    loop = Loop(Stack())
    loop.run(2)
    return loop.peak_bytes(), FixedMemory.of(loop.model, [loop.optimizer]).total


def budget(plain: tuple[int, int], share: float) -> int:
    peak, fixed = plain
    return round(fixed + share * (peak - fixed))


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_the_peak_of_a_step_keeps_to_the_budget(plain: tuple[int, int], share: float) -> None:
    loop = Loop(Stack(), budget(plain, share))
    loop.run(SETTLED)
    assert loop.peak_bytes() <= budget(plain, share)
    assert loop.plan.measured_peak_bytes == loop.peak_bytes()


def test_less_memory_is_more_recomputation(plain: tuple[int, int]) -> None:
    recomputed = []
    for share in (1.1, 0.8, 0.6, 0.4):
        loop = Loop(Stack(), budget(plain, share))
        loop.run(SETTLED)
        recomputed.append(sum(way != "keep" for way in loop.plan.ways.values()))
    assert recomputed[0] == 0
    assert recomputed == sorted(recomputed)
    assert recomputed[-1] > recomputed[1] > 0


@pytest.mark.parametrize("share", [1.1, 0.6, 0.4])
def test_losses_and_weights_are_those_of_the_plain_run(plain: tuple[int, int], share: float) -> None:
    torch.manual_seed(1)
    model = Stack()
    twin = copy.deepcopy(model)
    losses = Loop(model, budget(plain, share)).run(SETTLED + 2)
    assert losses == Loop(twin).run(SETTLED + 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_what_is_predicted_is_what_is_measured(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.6))
    loop.run(SETTLED)
    assert loop.plan.predicted_peak_bytes == pytest.approx(loop.plan.measured_peak_bytes, rel=0.02)
    assert loop.plan.plain_peak_bytes == pytest.approx(plain[0], rel=0.05)
    assert loop.plan.measured_ms is not None


def test_a_roomy_budget_changes_nothing() -> None:
    loop = Loop(Stack(), "1GiB")
    loop.run(SETTLED)
    assert set(loop.plan.ways.values()) == {"keep"}
    assert loop.handle.report.applied("gradient_checkpointing") == []
    assert "6 keep" in loop.handle.report.of("gradient_checkpointing").status


def test_an_impossible_budget_is_an_error_that_names_it_and_the_least(plain: tuple[int, int]) -> None:
    asked = budget(plain, 0.1)
    with pytest.raises(ValueError, match=f"({asked} bytes)") as error:
        Loop(Stack(), asked).run(SETTLED)
    least = int(str(error.value).split("about")[1].split("(")[1].split(" ")[0])
    assert asked < least < plain[0]
    loop = Loop(Stack(), round(1.03 * least))
    loop.run(SETTLED)
    assert loop.peak_bytes() <= 1.03 * least


def test_a_model_that_does_not_fit_itself_is_an_error_before_the_first_step() -> None:
    with pytest.raises(ValueError, match=r"do not hold the model itself.*Give a larger budget"):
        Loop(Stack(), "100KiB")


def test_a_fraction_is_one_of_the_device() -> None:
    loop = Loop(Stack(), 0.9)
    loop.run(SETTLED)
    assert loop.plan.budget_bytes > 2**27
    assert set(loop.plan.ways.values()) == {"keep"}


# -- what the report says --------------------------------------------------------------------------------------------


def test_the_report_has_a_table_by_block(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.6))
    loop.run(SETTLED)
    text = loop.handle.report.to_text()
    assert "fixed: parameters" in text
    assert "peak of a step: budget" in text
    assert all(f"blocks.{index}" in text for index in (0, 5))
    assert "gelu" in text  # what made the saved bytes
    record = loop.handle.report.of("gradient_checkpointing")
    assert set(record.changes) == {site for site, way in loop.plan.ways.items() if way != "keep"}
    assert set(record.refusals) == {site for site, way in loop.plan.ways.items() if way == "keep"}


def test_fixed_memory_is_counted_by_what_it_is() -> None:
    loop = Loop(Stack(), "1GiB")
    loop.run(SETTLED)
    size = sum(p.numel() * p.element_size() for p in loop.model.parameters())
    fixed = loop.plan.fixed
    assert (fixed.parameters, fixed.gradients, fixed.buffers) == (size, size, 0)
    assert fixed.optimizer >= 2 * size


def test_the_plan_is_drawn_as_stacked_bars(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.6))
    loop.run(SETTLED)
    loop.plan.plot("plan.svg")
    with open("plan.svg", encoding="utf-8") as drawn:
        assert drawn.read().count("<path") > 10


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
    for network, settings in ((model, {"gradient_checkpointing": {"budget": "700KiB"}}), (twin, {})):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        handle = accelerate(network, Plan(**{**PLAIN, **settings}))
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
        self.handle = accelerate(model, Plan(**{**PLAIN, **settings}))

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
    loop = TaskLoop(task.model(), task, gradient_checkpointing={"budget": asked})
    assert [loop.step(i) for i in range(SETTLED)] == [plain.step(i) for i in range(SETTLED)]
    assert loop.handle.report.applied("gradient_checkpointing")
    state = plain.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loop.model.state_dict().items())


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
    assert loop.plan.offloads_rest or {"offload", "full+offload"} & set(loop.plan.ways.values())
    loop.handle.undo()


# -- batches of other sizes ------------------------------------------------------------------------------------------


def ways(loop: Loop) -> dict[str, Way]:
    return dict(loop.plan.ways)


def test_a_larger_batch_makes_a_new_plan_that_fits_it(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.95), rows=128)
    loop.run(SETTLED)
    assert set(loop.plan.ways.values()) == {"keep"}
    loop.rows = 256
    loop.run(2)
    assert "full" in loop.plan.ways.values() or "selective" in loop.plan.ways.values()
    assert loop.peak_bytes() <= budget(plain, 0.95)


def test_a_smaller_batch_changes_no_plan(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.6))
    loop.run(SETTLED)
    before = loop.plan
    for rows in (64, 256, 32, 256):
        loop.step(rows)
    assert loop.plan is before


def test_batches_that_grow_bit_by_bit_do_not_make_a_plan_each(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.8), rows=128)
    loop.run(SETTLED)
    plans = {id(loop.plan): loop.plan}
    for rows in range(129, 193):
        loop.step(rows)
        plans[id(loop.plan)] = loop.plan
    planned = {plan.budget_bytes for plan in plans.values()}
    assert planned == {budget(plain, 0.8)}
    assert len({frozenset(plan.ways.items()) for plan in plans.values()}) <= 6


def test_a_batch_that_cannot_fit_is_said_and_runs_as_lean_as_it_can(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.5), rows=256)
    loop.run(SETTLED)
    loop.step(2048)
    with pytest.warns(AccelWarning, match="may not fit"):
        loop.step(2048)
    assert set(loop.plan.ways.values()) == {"full"}


def test_attention_by_hand_is_planned_by_the_square_of_its_length() -> None:
    """A longer batch is measured when it comes, not scaled by its length."""

    class Attending(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x @ x.transpose(-1, -2)).softmax(-1) @ x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Attending() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    loop = Loop(Model(), "12MiB", rows=64)
    loop.run(SETTLED)
    assert set(loop.plan.ways.values()) == {"keep"}
    loop.rows = 512
    loop.run(3)
    assert set(loop.plan.ways.values()) > {"keep"}
    assert loop.peak_bytes() <= loop.plan.predicted_peak_bytes <= 12 * 2**20


def test_two_sizes_in_one_step_are_no_growth(plain: tuple[int, int]) -> None:
    class Crops(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x[:32]), super().forward(x)])

    loop = Loop(Crops(blocks=3), "8MiB")
    loop.run(SETTLED)
    before = loop.plan
    loop.run(3)
    assert loop.plan is before
    assert set(before.ways.values()) == {"keep"}


class Skipping(Stack):
    """Stochastic depth: every block is left out three times in ten."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                x = block(x)
        return x


@pytest.mark.parametrize("share", [1.1, 0.7])
def test_blocks_that_are_left_out_at_random_are_planned_for_all(plain: tuple[int, int], share: float) -> None:
    """Stochastic depth: a step that called fewer blocks is no measure of one that calls all."""
    torch.manual_seed(1)
    model = Skipping()
    twin = copy.deepcopy(model)
    runs = []
    for loop in (Loop(model, budget(plain, share)), Loop(twin)):
        torch.manual_seed(2)
        runs.append(loop.run(6 * SETTLED))
    assert runs[0] == runs[1]


def test_blocks_that_are_left_out_at_random_do_not_make_a_plan_a_step() -> None:
    torch.manual_seed(2)
    loop = Loop(Skipping(), "1GiB")
    loop.run(6 * SETTLED)
    before = loop.plan
    loop.run(SETTLED)
    assert loop.plan is before


# -- what gets in the way --------------------------------------------------------------------------------------------


def test_beside_another_profiler_every_block_recomputes_and_a_warning_says_why() -> None:
    loop = Loop(Stack(), "1GiB")
    with profile(), pytest.warns(AccelWarning, match="another profiler is at work"):
        loop.run(MAX_WAITING_STEPS + 2)
    assert loop.handle.memory_plan is None
    assert "every block recomputes" in loop.handle.report.of("gradient_checkpointing").status


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
    assert "its forward changes" in loop.handle.report.of("gradient_checkpointing").status


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
    assert Loop(model, "1GiB", verify=False).run(SETTLED) == Loop(twin).run(SETTLED)


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


def test_deterministic_runs_plan_alike(plain: tuple[int, int], determinism_restored: None) -> None:
    torch.use_deterministic_algorithms(True)
    found = []
    for _ in range(3):
        loop = Loop(Stack(), budget(plain, 0.6))
        loop.run(SETTLED)
        found.append(loop.plan.ways)
    assert found[0] == found[1] == found[2]


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


def test_two_models_are_planned_side_by_side() -> None:
    loops = [Loop(Stack(), "1GiB"), Loop(Stack(), "1GiB")]
    for _ in range(2 * SETTLED):
        for loop in loops:
            loop.step()
    assert all(loop.plan.measured_peak_bytes for loop in loops)


# -- without an engine -----------------------------------------------------------------------------------------------


@pytest.fixture
def trained() -> tuple[nn.Module, Optimizer, Callable[[nn.Module, Tensor], None]]:
    torch.manual_seed(1)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def test_plan_memory_plans_and_leaves_no_trace(plain: tuple[int, int], trained: Any) -> None:
    model, optimizer, step = trained
    step(model, torch.randn(4, 32))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random_state = torch.get_rng_state()
    plan = plan_memory(model, torch.randn(256, 32), budget(plain, 0.6), step)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= budget(plain, 0.6)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.randn(256, 32)
    assert random_state is not None


def test_a_plan_is_applied_and_taken_back(plain: tuple[int, int], trained: Any) -> None:
    model, optimizer, step = trained
    batch = torch.randn(256, 32)
    plan = plan_memory(model, batch, budget(plain, 0.6), step)
    patches = plan.apply(model)
    meter = meter_for(torch.device("cpu"))
    step(model, batch)
    meter.start([*model.parameters(), *state_of([optimizer])])
    step(model, batch)
    assert max(interval.peak_bytes for interval in meter.stop()) <= budget(plain, 0.6)
    patches.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_applied_plan_that_offloads_the_rest_does_so() -> None:
    class Wide(nn.Module):
        """Most of what it saves is saved outside its blocks."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(12):
                x = (x * self.scale).sigmoid()
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(1)
    model, batch = Wide(), torch.randn(1024, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = peak_of(lambda: step(model, batch), model, optimizer)
    plan = plan_memory(model, batch, plain // 2, step, offloading=OffloadingPlan(to="disk", min_bytes=1024))
    assert plan.offloads_rest
    patches = plan.apply(model)
    step(model, batch)
    assert peak_of(lambda: step(model, batch), model, optimizer) <= 1.02 * (plain // 2)
    patches.undo()


def test_plan_memory_says_when_the_step_calls_no_block() -> None:
    model = TinyTransformer()
    with pytest.raises(RuntimeError, match="nothing was planned"):
        plan_memory(model, None, "1GiB", lambda model, batch: None)


# -- on a GPU --------------------------------------------------------------------------------------------------------


class GpuLoop:
    """A plain loop on a stack of some size, on the current GPU."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(1)
        self.model = Stack(blocks=12, width=512).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(8192, 512, generator=torch.Generator().manual_seed(0)).cuda()
        self.handle = accelerate(self.model, Plan(**{**PLAIN, **settings}))

    def step(self) -> float:
        with self.handle.step():
            loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def peak_bytes(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return torch.cuda.max_memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_on_a_gpu_the_allocators_own_peak_keeps_to_the_budget(share: float) -> None:
    plain = GpuLoop()
    losses = [plain.step() for _ in range(SETTLED)]
    peak, fixed = plain.peak_bytes(), FixedMemory.of(plain.model).total
    del plain
    asked = round(fixed + share * (peak - fixed))
    loop = GpuLoop(gradient_checkpointing={"budget": asked})
    assert [loop.step() for _ in range(SETTLED)] == pytest.approx(losses, rel=1e-5)
    assert loop.peak_bytes() <= asked
    loop.handle.undo()


@pytest.mark.gpu
def test_on_a_gpu_blocks_may_offload_without_being_asked() -> None:
    loop = GpuLoop(gradient_checkpointing={"budget": 0.9})
    for _ in range(SETTLED):
        loop.step()
    planner = loop.handle.memory_plan
    assert planner is not None
    assert planner.budget_bytes == int(0.9 * torch.cuda.get_device_properties(0).total_memory)
    assert set(planner.ways.values()) == {"keep"}
    loop.handle.undo()
