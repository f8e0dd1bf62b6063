"""``compile="auto"`` on a GPU has a second choice: CUDA graphs of the compiled blocks, with all that these refuse.

Without a GPU the capture is simulated: what is replayed works in memory of its own, as a CUDA graph does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.assembly import accelerate
from lightning_accel.core.host import Host
from lightning_accel.engine import Engine
from lightning_accel.settings import Plan
from lightning_accel.techniques.arms import OFF
from lightning_accel.techniques.compilation import CompilationOnTrial
from lightning_accel.techniques.graphed_block import Capture
from support.live_runs import OTHERS_OFF
from support.simulated_graphs import Block, SimulatedGraphs

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]

GPU = Host(kind="cuda", device_name="a simulated card", capability=(9, 0), native_bf16=True, compiler="triton")


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.1, self.training))


@pytest.fixture(autouse=True)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """In place of TorchInductor, but for a GPU: what was compiled runs as it was captured, and every run is noted."""
    runs: list[int] = []

    def compile_with_inductor(graph: Any, inputs: Any, options: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            runs.append(1)
            return graph.forward(*args)

        return call

    torch._dynamo.reset()
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("lightning_accel.core.compiled.compile_with_inductor", compile_with_inductor)
    yield runs
    torch._dynamo.reset()


class Run:
    """A model of two blocks between layers, compiled and captured by simulation, with its arm."""

    def __init__(self, make: Callable[[], nn.Module] = Block, capture: Capture | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), make(), make(), nn.Linear(4, 2))
        self.plain = copy.deepcopy(self.model)
        self.graphs = SimulatedGraphs()
        self.engine = Engine(self.model, GPU, [CompilationOnTrial("auto", capture=capture or self.graphs.capture)])
        for _ in range(3):
            self.step(self.model)
        (self.arm,) = self.engine.arms()
        assert self.arm.setup is not None
        self.setup = self.arm.setup

    def set_up(self, choice: str = "on") -> float | None:
        self.setup.begin(math.inf)
        self.arm.choose(choice)
        self.step(self.model)
        taken = self.setup.end()
        self.step(self.model)
        return taken

    def step(self, model: nn.Module, batch: Tensor | None = None) -> None:
        with self.engine.step():
            loss = model(torch.ones(3, 4) if batch is None else batch).square().mean()
        loss.backward()

    def check_same(self, steps: int = 1) -> None:
        """Trains both models so, adding gradients up, and compares them."""
        for model in (self.model, self.plain):
            model.zero_grad()
            for number in range(steps):
                self.step(model, torch.full((3, 4), 1.0 + number))
        for found, expected in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)

    def replayed(self) -> int:
        """How many blocks a step replays."""
        before = self.graphs.replays
        self.check_same()
        return self.graphs.replays - before

    def in_force(self) -> str:
        return " ".join(self.engine.report.of("compile").changes.values())


def test_a_gpu_has_a_second_choice_and_a_cpu_has_not() -> None:
    assert Run().arm.choices == ("on", "graphs")
    cpu = Host(kind="cpu", device_name="a CPU", compiler="g++")
    handle = accelerate(Run().plain, Plan().replace(**OTHERS_OFF | {"compile": "auto"}), host=cpu)
    with handle.step():
        handle.model(torch.ones(3, 4)).sum().backward()
    assert [arm.choices for arm in handle.engine.arms()] == [("on",)]
    handle.undo()


def test_each_choice_has_its_own_and_all_train_the_same(compiled: list[int]) -> None:
    run = Run()
    assert run.set_up() is not None
    assert run.arm.has("graphs")
    assert run.replayed() == 0
    run.arm.choose("graphs")
    assert run.replayed() == 2
    run.arm.choose("on")
    compiled.clear()
    assert run.replayed() == 0
    assert len(compiled) == 2
    run.arm.choose(OFF)
    compiled.clear()
    assert run.replayed() == 0
    assert compiled == []
    run.arm.choose("graphs")
    assert run.replayed() == 2
    run.engine.undo()


def test_what_was_compiled_is_what_is_captured(compiled: list[int]) -> None:
    run = Run()
    run.set_up()
    compiled.clear()
    run.arm.choose("graphs")
    run.step(run.model)
    assert compiled
    run.engine.undo()


def test_gradients_add_up_over_steps() -> None:
    """With the compiler's own graphs that raises."""
    run = Run()
    run.set_up()
    run.arm.choose("graphs")
    run.check_same(steps=3)
    run.engine.undo()


def test_an_evaluation_between_runs_compiled() -> None:
    """With the compiler's own graphs the second block would get an output that is no more."""
    run = Run()
    run.set_up()
    run.arm.choose("graphs")
    run.check_same()
    before = run.graphs.replays
    with run.engine.step("validate"), torch.no_grad():
        torch.testing.assert_close(run.model(torch.ones(3, 4)), run.plain(torch.ones(3, 4)))
    assert run.graphs.replays == before
    run.check_same()
    run.engine.undo()


def test_a_run_that_begins_with_graphs_has_them_after_its_setup() -> None:
    run = Run()
    assert run.set_up("graphs") is not None
    assert run.replayed() == 2
    run.engine.undo()


def test_blocks_that_no_graph_can_hold_stay_compiled_with_the_reason(compiled: list[int]) -> None:
    run = Run(Dropping)
    assert run.set_up() is not None
    assert not run.arm.has("graphs")
    assert "without a CUDA graph: draws random numbers" in run.in_force()
    run.arm.choose("graphs")
    compiled.clear()
    run.step(run.model)
    assert len(compiled) == 2
    assert run.graphs.replays == 0
    run.engine.undo()


def test_a_capture_that_fails_leaves_the_compiled_block() -> None:
    def failing(function: Any, tensors: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    run = Run(capture=failing)
    assert run.set_up() is not None
    assert not run.arm.has("graphs")
    assert "without a CUDA graph: cannot be captured: RuntimeError: operation not permitted" in run.in_force()
    run.check_same()
    run.engine.undo()


def test_a_capture_that_computes_something_else_is_not_had() -> None:
    def wrong(function: Any, tensors: Any) -> Any:
        return lambda *inputs: 1.1 * function(*inputs)

    run = Run(capture=wrong)
    assert run.set_up() is not None
    assert not run.arm.has("graphs")
    assert "without a CUDA graph: other numbers than the original" in run.in_force()
    run.engine.undo()


def test_rank_0_decides_whether_graphs_are_asked_for() -> None:
    run = Run()
    technique = run.engine.technique(CompilationOnTrial)
    assert technique is not None
    technique.run.agree = lambda found: False if isinstance(found, bool) else found
    run.set_up()
    assert not run.arm.has("graphs")
    run.engine.undo()


def test_shapes_that_keep_changing_end_the_replays_and_not_the_compiled_block() -> None:
    run = Run()
    run.set_up()
    run.arm.choose("graphs")
    run.check_same()
    for size in range(4, 14):
        run.step(run.model, torch.ones(size, 4))
    assert run.replayed() == 0
    assert run.engine.report.applied("compile") == ["1", "2"]
    assert "without a CUDA graph: given back: the last 9 calls had other shapes than the first" in run.in_force()
    run.engine.undo()


def test_undone_the_model_is_what_it_was() -> None:
    run = Run()
    before = {name: set(vars(module)) for name, module in run.plain.named_modules()}
    run.set_up("graphs")
    run.engine.undo()
    after = {name: set(vars(module)) - {"_compiled_call_impl"} for name, module in run.model.named_modules()}
    assert after == before
    assert all(module._compiled_call_impl is None for module in run.model.modules())


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.needs_kernels("Inductor")
@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_compiled_blocks_are_replayed_and_train_the_same() -> None:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(3))
    plain = nn.Sequential(nn.Linear(64, 64), *blocks).cuda()
    model = copy.deepcopy(plain)
    host = Host.detect("cuda")
    if host.compiler is None:
        pytest.skip("no Triton here")
    engine = Engine(model, host, [CompilationOnTrial("auto")])

    def train(net: nn.Module, batch: Tensor) -> None:
        with engine.step() if net is model else torch.enable_grad():
            loss = net(batch).square().mean()
        loss.backward()

    batch = torch.randn(8, 64, device="cuda")
    for _ in range(3):
        train(model, batch)
    (arm,) = engine.arms()
    assert arm.choices == ("on", "graphs")
    assert arm.setup is not None
    arm.setup.begin(math.inf)
    arm.choose("on")
    train(model, batch)
    assert arm.setup.end() is not None, engine.report
    train(model, batch)
    assert engine.report.applied("compile") == ["1", "2", "3"], engine.report
    assert arm.has("graphs"), engine.report
    for choice in ("graphs", "on", OFF, "graphs"):
        arm.choose(choice)
        for net in (model, plain):
            net.zero_grad()
            for _ in range(3):  # gradients add up, too
                train(net, torch.randn(8, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1)))
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)
        with engine.step("validate"), torch.no_grad():
            torch.testing.assert_close(model(batch), plain(batch), rtol=1e-4, atol=1e-5)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(model, batch)
        launched = [event.name for event in profile.events() if "GraphLaunch" in event.name]
        assert len(launched) in ((0, 6) if choice == "graphs" else (0,))  # where the profiler names them
    engine.undo()
