"""CUDA graphs of blocks: replayed where that is right, run as written where not, refused with the reason.

Without a GPU the capture is simulated: what is replayed works in memory of its own, as a CUDA graph does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import AccelPlugin, Plan
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelWarning
from lightning_accel.core.torch_private.modes import DispatchMode
from lightning_accel.engine import Engine
from lightning_accel.techniques.arms import OFF
from lightning_accel.techniques.graphs import Graphs
from support.simulated_graphs import Block, SimulatedGraphs

pytestmark = pytest.mark.numbers

GPU = Host(kind="cuda", device_name="a simulated card", capability=(9, 0), native_bf16=True)


class Changing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Choosing(Block):
    """Asks for a value, and goes by it: a synchronisation, which no capture allows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Run:
    """A model of two blocks between layers, and an engine that captures them by simulation."""

    def __init__(self, make: Callable[[], nn.Module] = Block, mode: Any = "on", shared: bool = False) -> None:
        torch.manual_seed(0)
        first = make()
        second = first if shared else make()
        self.model = nn.Sequential(nn.Linear(4, 4), first, second, nn.Linear(4, 2))
        self.plain = copy.deepcopy(self.model)
        self.graphs = SimulatedGraphs()
        self.technique = Graphs(mode, capture=self.graphs.capture)
        self.engine = Engine(self.model, GPU, [self.technique])
        for _ in range(2):
            self.step(self.model)
        self.model.zero_grad()

    def step(self, model: nn.Module, batch: Tensor | None = None) -> Tensor:
        batch = torch.randn(3, 4) if batch is None else batch
        with self.engine.step():
            loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    def refused(self) -> set[str]:
        return set(self.engine.report.refused("graphs").values())

    def check_same(self, train: Callable[[nn.Module], Any]) -> None:
        """Trains both models so, and compares all gradients."""
        self.model.zero_grad()
        self.plain.zero_grad()
        for model in (self.model, self.plain):
            train(model)
        for (name, found), expected in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_every_block_is_captured_once_and_replayed_in_each_step() -> None:
    run = Run()
    assert run.engine.report.applied("graphs") == ["1", "2"]
    before = run.graphs.replays
    for _ in range(5):
        run.check_same(lambda model: run.step(model, torch.ones(3, 4)))
    assert run.graphs.captures == 2
    assert run.graphs.replays == before + 10


def test_gradients_that_accumulate_are_not_those_of_the_last_replay() -> None:
    """A graph writes its gradients where it wrote the last ones, which ``.grad`` must not be."""
    run = Run()
    batches = torch.randn(3, 3, 4)
    run.check_same(lambda model: [run.step(model, batch) for batch in batches])


def test_outputs_that_somebody_keeps_stay_as_they_are() -> None:
    run = Run()
    with run.engine.step():
        kept = run.model[1](torch.ones(3, 4))
    value = kept.detach().clone()
    kept.sum().backward()
    with run.engine.step():
        run.model[1](torch.zeros(3, 4)).sum().backward()
    torch.testing.assert_close(kept.detach(), value)


@pytest.mark.parametrize("shared", [False, True], ids=["called twice", "a shared block"])
def test_two_calls_before_a_backward_pass_do_not_overwrite_each_other(shared: bool) -> None:
    run = Run(shared=shared)
    one, other = torch.randn(2, 3, 4)

    def train(model: nn.Module) -> None:
        with run.engine.step():
            (model(one).square().mean() + 2 * model(other).square().mean()).backward()

    for _ in range(2):
        run.check_same(train)


def test_losses_of_two_steps_that_go_backward_together_are_right() -> None:
    run = Run()
    batches = torch.randn(2, 3, 4)

    def train(model: nn.Module) -> None:
        losses = []
        for batch in batches:
            with run.engine.step():
                losses.append(model(batch).square().mean())
        sum(losses).backward()  # type: ignore[union-attr]

    run.check_same(train)


def test_a_call_whose_result_is_dropped_does_not_keep_the_next_from_being_replayed() -> None:
    run = Run()
    before = run.graphs.replays
    for _ in range(3):
        with run.engine.step():
            run.model(torch.ones(3, 4))
    assert run.graphs.replays == before + 6


def test_a_second_backward_pass_through_an_overwritten_graph_is_an_error() -> None:
    run = Run()
    with run.engine.step():
        loss = run.model(torch.ones(3, 4)).sum()
    loss.backward(retain_graph=True)
    with run.engine.step():
        run.model(torch.ones(3, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"compile\.graphs='off' where a graph is retained"):
        loss.backward()


def test_other_shapes_and_evaluations_run_as_written() -> None:
    run = Run()
    before = run.graphs.replays
    run.check_same(lambda model: run.step(model, torch.ones(5, 4)))
    run.model.eval()
    with run.engine.step("validate"), torch.no_grad():
        torch.testing.assert_close(run.model(torch.ones(3, 4)), run.plain(torch.ones(3, 4)))
    assert run.graphs.replays == before
    assert run.engine.report.applied("graphs") == ["1", "2"]


def test_shapes_that_keep_changing_have_it_given_back() -> None:
    run = Run()
    for size in range(4, 16):
        run.step(run.model, torch.ones(size, 4))
    assert run.engine.report.applied("graphs") == []
    assert run.refused() == {"given back: the last 9 calls had other shapes than the first"}


def test_parameters_that_move_have_it_given_back() -> None:
    run = Run()
    for model in (run.model, run.plain):
        model[1].layer.weight.data = torch.ones(4, 4)
    run.check_same(lambda model: run.step(model, torch.ones(3, 4)))
    assert "1" not in run.engine.report.applied("graphs")
    assert "given back: its parameters have moved in memory" in run.refused()


@pytest.mark.parametrize("change", ["a layer more", "another parameter", "a parameter more"])
def test_parts_that_change_in_mid_run_have_it_given_back(change: str) -> None:
    run = Run()
    for model in (run.model, run.plain):
        layer = model[1].layer
        with torch.random.fork_rng():
            torch.manual_seed(1)
            if change == "a layer more":
                model[1].layer = nn.Sequential(layer, nn.Linear(4, 4))
            elif change == "another parameter":
                layer.bias = nn.Parameter(torch.ones(4))
            else:
                torch.nn.utils.parametrizations.weight_norm(layer)
    run.check_same(lambda model: run.step(model, torch.ones(3, 4)))
    assert run.refused() == {"given back: its modules, parameters or buffers are others than they were"}


def test_values_that_an_optimizer_writes_in_place_are_read() -> None:
    run = Run()
    for _ in range(3):
        run.check_same(lambda model: run.step(model, torch.ones(3, 4)))
        for model in (run.model, run.plain):
            torch.optim.SGD(model.parameters(), lr=0.5).step()


def test_hooks_registered_later_are_called() -> None:
    run = Run()
    called: list[int] = []
    run.model[1].layer.register_forward_hook(lambda *_: called.append(1))
    run.step(run.model)
    assert called == [1]
    assert "given back: it was given hooks, which a replay does not call" in run.refused()


def with_hook() -> nn.Module:
    block = Block()
    block.layer.register_forward_hook(lambda *_: None)
    return block


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_hook, "has hooks, which a replay does not call"),
        (with_dropout, "draws random numbers"),
        (Changing, "its forward changes calls, which a replay does not"),
    ],
)
def test_what_a_replay_would_leave_out_is_refused(make: Callable[[], nn.Module], reason: str) -> None:
    run = Run(make)
    assert run.engine.report.applied("graphs") == []
    assert all(reason in why for why in run.refused()), run.refused()
    assert run.graphs.captures == 0


def test_what_cannot_be_captured_runs_as_written_with_torchs_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a real capture refuses a block that waits for the device."""

    def capture(graphs: SimulatedGraphs, function: Any, tensors: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be …")

    monkeypatch.setattr(SimulatedGraphs, "capture", capture)
    run = Run(Choosing)
    assert run.refused() == {
        "cannot be captured: RuntimeError: operation not permitted when stream is capturing",
    }
    run.check_same(lambda model: run.step(model, torch.ones(3, 4)))


def test_a_block_without_parameters_or_buffers_is_captured_too() -> None:
    run = Run(lambda: nn.Sequential(nn.Softplus(), nn.Tanh()))
    assert run.engine.report.applied("graphs") == ["1", "2"], run.refused()
    run.check_same(lambda model: run.step(model, torch.ones(3, 4)))


class Watching(DispatchMode):
    """Sees every operation, and does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "watch",
    [Watching, lambda: torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)],
    ids=["a mode", "hooks on what is saved"],
)
def test_what_watches_the_trial_is_not_in_the_graph(
    watch: Callable[[], AbstractContextManager[Any]],
) -> None:
    """SpeedMemoryLogger, that counts the operations of a step, say."""
    with watch():
        run = Run()
    assert run.refused() == set()
    replays = run.graphs.replays
    run.check_same(lambda model: run.step(model, torch.ones(3, 4)))
    assert run.graphs.replays == replays + 2
    with watch():
        run.check_same(lambda model: run.step(model, torch.ones(3, 4)))
    assert run.graphs.replays == replays + 2


def test_running_statistics_are_moved_as_often_as_in_a_plain_run() -> None:
    run = Run(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for (name, moved), kept in zip(run.model.named_buffers(), run.plain.buffers(), strict=True):
        if "num_batches" in name:
            assert moved.item() - kept.item() == 2, name


def test_off_its_memory_is_given_back_and_on_it_is_captured_anew() -> None:
    run = Run(mode="auto")
    (arm,) = run.engine.arms()
    captures, replays = run.graphs.captures, run.graphs.replays
    arm.choose(OFF)
    run.check_same(lambda model: run.step(model, torch.ones(3, 4)))
    assert run.graphs.replays == replays
    arm.choose("on")
    for _ in range(2):
        run.check_same(lambda model: run.step(model, torch.ones(3, 4)))
    assert run.graphs.captures == captures + 2
    assert run.graphs.replays == replays + 4
    run.engine.undo()


def test_what_was_asked_for_by_name_has_no_arm() -> None:
    assert Run(mode="on").engine.arms() == []


def test_undone_the_model_is_what_it_was() -> None:
    run = Run()
    run.engine.undo()
    assert not any("forward" in vars(module) for module in run.model.modules())
    replays = run.graphs.replays
    run.check_same(lambda model: run.step(model, torch.ones(3, 4)))
    assert run.graphs.replays == replays


def test_a_copy_of_the_model_computes_by_itself() -> None:
    run = Run()
    twin = copy.deepcopy(run.model)
    replays = run.graphs.replays
    with torch.no_grad():
        twin[1].layer.weight.zero_()
    twin(torch.ones(3, 4)).sum().backward()
    assert run.graphs.replays == replays


@pytest.mark.parametrize("kind", ["cpu", "rocm", "mps", "xla"])
def test_elsewhere_it_is_not_to_be_had(kind: Any) -> None:
    host = Host(kind=kind, device_name="a machine")
    with pytest.warns(AccelWarning, match="CUDA graphs are for NVIDIA GPUs, and this is a machine"):
        Engine(nn.Sequential(Block(), Block()), host, [Graphs()])


def test_with_a_compiler_the_way_to_its_own_graphs_is_named() -> None:
    with pytest.raises(ValueError, match=r"compile.graphs='on' with compile='on'.*reduce-overhead"):
        Plan(compile={"graphs": "on", "mode": "on"})
    assert AccelPlugin(compile={"graphs": "auto"}).plan.of("graphs") == "auto"


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.needs_kernels("the profiler counts a driver's launches")
@pytest.mark.gpu
def test_on_a_gpu_a_step_launches_a_graph_for_each_block_and_trains_the_same() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))).cuda()
    model = copy.deepcopy(plain)
    engine = Engine(model, Host.detect("cuda"), [Graphs()])
    for _ in range(4):
        batch = torch.randn(8, 64, device="cuda")
        for net in (model, plain):
            net.zero_grad()
            with engine.step() if net is model else torch.enable_grad():
                loss = net(batch).square().mean()
            loss.backward()
    assert engine.report.applied("graphs") == ["1", "2", "3"], engine.report
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with engine.step():
            loss = model(batch).square().mean()
        loss.backward()
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.name == "cudaGraphLaunch"]
    assert len(launched) == 6  # one forward, one backward, for each block
    engine.undo()


@pytest.mark.gpu
def test_on_a_gpu_a_block_that_waits_for_the_device_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Choosing(), Choosing()).cuda()
    engine = Engine(model, Host.detect("cuda"), [Graphs()])
    for _ in range(3):
        with engine.step():
            loss = model(torch.randn(3, 4, device="cuda")).square().mean()
        loss.backward()
    assert engine.report.applied("graphs") == []
    assert all("cannot be captured" in why for why in engine.report.refused("graphs").values())
    engine.undo()


@pytest.mark.gpu
def test_on_a_gpu_memory_is_given_back_when_it_is_off() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))).cuda()
    engine = Engine(model, Host.detect("cuda"), [Graphs("auto")])

    def train() -> None:
        with engine.step():
            loss = model(torch.ones(512, 512, device="cuda")).square().mean()
        loss.backward()
        model.zero_grad()

    for _ in range(3):
        train()
    (arm,) = engine.arms()
    held = torch.cuda.memory_allocated()
    arm.choose(OFF)
    train()
    assert torch.cuda.memory_allocated() < held
    engine.undo()
