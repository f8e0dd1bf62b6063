"""A budget is kept, by the least recomputation that keeps it, whatever the batch, and numbers do not notice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import AccelWarning, Plan, accelerate
from lightning_accel.memory.schedule import FixedMemory
from support.gpu_sizes import on_gpu
from support.techniques.memory_budget_cases import PLAIN, SETTLED, Block, Loop, Stack, budget, handles_are_undone, plain

pytestmark = pytest.mark.numbers

__all__ = ["handles_are_undone", "plain"]


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_the_peak_of_a_step_keeps_to_the_budget(plain: tuple[int, int], share: float) -> None:
    loop = Loop(Stack(), budget(plain, share))
    loop.run(SETTLED)
    assert loop.peak_bytes() <= budget(plain, share)
    assert loop.plan.measured_peak_bytes == loop.peak_bytes()


@pytest.mark.medium
def test_less_memory_is_more_recomputation(plain: tuple[int, int]) -> None:
    recomputed = []
    for share in (1.1, 0.8, 0.6, 0.4):
        loop = Loop(Stack(), budget(plain, share))
        loop.run(SETTLED)
        recomputed.append(sum(way != "keep" for way in loop.plan.policies.values()))
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
    assert set(loop.plan.policies.values()) == {"keep"}
    assert loop.handle.report.applied("memory_budget") == []
    assert "6 keep" in loop.handle.report.of("memory_budget").status


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
    loop = Loop(Stack(), "90%")
    loop.run(SETTLED)
    assert loop.plan.budget_bytes > 2**27
    assert set(loop.plan.policies.values()) == {"keep"}


# -- batches of other sizes ------------------------------------------------------------------------------------------


def test_a_larger_batch_makes_a_new_plan_that_fits_it(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.95), rows=128)
    loop.run(SETTLED)
    assert set(loop.plan.policies.values()) == {"keep"}
    loop.rows = 256
    loop.run(2)
    assert "full" in loop.plan.policies.values() or "selective" in loop.plan.policies.values()
    assert loop.peak_bytes() <= budget(plain, 0.95)


def test_a_smaller_batch_changes_no_plan(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.6))
    loop.run(SETTLED)
    before = loop.plan
    for rows in (64, 256, 32, 256):
        loop.step(rows)
    assert loop.plan is before


@pytest.mark.medium
def test_batches_that_grow_bit_by_bit_do_not_make_a_plan_each(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.8), rows=128)
    loop.run(SETTLED)
    plans = {id(loop.plan): loop.plan}
    for rows in range(129, 193):
        loop.step(rows)
        plans[id(loop.plan)] = loop.plan
    planned = {plan.budget_bytes for plan in plans.values()}
    assert planned == {budget(plain, 0.8)}
    assert len({frozenset(plan.policies.items()) for plan in plans.values()}) <= 6


def test_a_batch_that_cannot_fit_is_said_and_runs_as_lean_as_it_can(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.5), rows=256)
    loop.run(SETTLED)
    loop.step(2048)
    with pytest.warns(AccelWarning, match="may not fit"):
        loop.step(2048)
    assert set(loop.plan.policies.values()) == {"full"}


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
    assert set(loop.plan.policies.values()) == {"keep"}
    loop.rows = 512
    loop.run(3)
    assert set(loop.plan.policies.values()) > {"keep"}
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
    assert set(before.policies.values()) == {"keep"}


class Skipping(Stack):
    """Stochastic depth: every block is left out three times in ten."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                x = block(x)
        return x


@pytest.mark.medium
@pytest.mark.parametrize("share", [pytest.param(1.1, marks=pytest.mark.slow), 0.7])
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


def test_a_block_that_is_first_called_while_others_are_planned_is_planned_too() -> None:
    """Stochastic depth may leave a block out of the first steps."""

    class Late(Stack):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for block in self.blocks if self.calls > 3 else self.blocks[:-1]:
                x = block(x)
            return x

    loop = Loop(Late(blocks=4), "1GiB")
    loop.run(SETTLED + 4)
    assert loop.plan.policies == {f"blocks.{number}": "keep" for number in range(4)}


# -- on a GPU --------------------------------------------------------------------------------------------------------


class GpuLoop:
    """A plain loop on a stack of some size, on the current GPU."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(1)
        width = on_gpu(512, simulated=128)
        self.model = Stack(blocks=12, width=width).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        rows = on_gpu(8192, simulated=2048)
        self.x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).cuda()
        self.handle = accelerate(self.model, Plan().replace(**{**PLAIN, **settings}))

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
    loop = GpuLoop(memory_budget=f"{asked}B")
    assert [loop.step() for _ in range(SETTLED)] == pytest.approx(losses, rel=1e-5)
    assert loop.peak_bytes() <= asked
    loop.handle.undo()


@pytest.mark.gpu
def test_on_a_gpu_the_peak_does_not_depend_on_how_far_copies_are(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = GpuLoop()
    for _ in range(SETTLED):
        plain.step()
    peak, fixed = plain.peak_bytes(), FixedMemory.of(plain.model).total
    del plain
    asked = round(fixed + 0.4 * (peak - fixed))
    loop = GpuLoop(memory_budget=f"{asked}B", activation_offloading="host")
    for _ in range(SETTLED):
        loop.step()
    soon = loop.peak_bytes()
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: False)  # as where the host is far ahead
    assert loop.peak_bytes() == soon <= asked
    loop.handle.undo()


@pytest.mark.gpu
def test_on_a_gpu_blocks_may_offload_without_being_asked() -> None:
    loop = GpuLoop(memory_budget="90%")
    for _ in range(SETTLED):
        loop.step()
    planner = loop.handle.memory_schedule
    assert planner is not None
    assert planner.budget_bytes == int(0.9 * torch.cuda.get_device_properties(0).total_memory)
    assert set(planner.policies.values()) == {"keep"}
    loop.handle.undo()


@pytest.mark.gpu
def test_on_a_gpu_no_block_offloads_where_that_is_off() -> None:
    plain = GpuLoop()
    for _ in range(SETTLED):
        plain.step()
    peak, fixed = plain.peak_bytes(), FixedMemory.of(plain.model).total
    del plain
    asked = round(fixed + on_gpu(0.4, simulated=0.6) * (peak - fixed))
    loop = GpuLoop(memory_budget=f"{asked}B", activation_offloading="off")
    for _ in range(SETTLED):
        loop.step()
    assert loop.handle.memory_schedule is not None
    assert not {"offload", "full+offload"} & set(loop.handle.memory_schedule.policies.values())
    loop.handle.undo()
