"""``compile="auto"``: compiled when live trials ask for it, in one step, as far as the run can afford it."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.assembly import AcceleratedModel, accelerate
from lightning_accel.core import compiled
from lightning_accel.core.host import Host
from lightning_accel.experiment.store import kernel_folder
from lightning_accel.experiment.trial import Trial
from lightning_accel.settings import Plan
from lightning_accel.techniques import compilation, compiled_blocks
from lightning_accel.techniques.arms import OFF, Arm, ArmSetup
from lightning_accel.techniques.compilation import CompilationOnTrial
from lightning_accel.techniques.technique_context import Verdict
from support.live_runs import OTHERS_OFF

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]

CPU = Host(kind="cpu", device_name="a CPU", compiler="g++")


class Block(nn.Module):
    """A block that computes with a Python number of its own."""

    def __init__(self, factor: float = 2.0, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * torch.tanh(self.layer(x))


class Compiler:
    """In place of TorchInductor: counts the graphs, and what runs of them; computes as ``run`` has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs = 0
        self.ran = 0
        self.run: Callable[[Any, tuple[Any, ...]], Any] = lambda graph, args: graph.forward(*args)
        monkeypatch.setattr(compiled, "compile_with_inductor", self._compile)

    def _compile(self, graph: Any, inputs: Any, options: Any) -> Callable[..., Any]:
        self.graphs += 1

        def call(*args: Any) -> Any:
            self.ran += 1
            return self.run(graph, args)

        return call


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    torch._dynamo.reset()
    yield Compiler(monkeypatch)
    torch._dynamo.reset()


def blocks(*factors: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *(Block(factor) for factor in factors))


def started(model: nn.Module, **plan: Any) -> tuple[AcceleratedModel, Arm, ArmSetup]:
    """A run after the trials of the parts, with its arm."""
    handle = accelerate(model, Plan().replace(**OTHERS_OFF | {"compile": "auto"} | plan), host=CPU)
    for _ in range(3):
        train(handle)
    (arm,) = handle.engine.arms()
    assert arm.setup is not None
    return handle, arm, arm.setup


def train(handle: AcceleratedModel, size: int = 3) -> Tensor:
    handle.model.zero_grad()
    with handle.step():
        loss = handle.model(torch.ones(size, 4)).square().mean()
    loss.backward()
    return loss.detach()


def set_up(handle: AcceleratedModel, arm: Arm, setup: ArmSetup, may_take_s: float = math.inf) -> float | None:
    setup.begin(may_take_s)
    arm.choose("on")
    train(handle)
    taken = setup.end()
    train(handle)
    return taken


def test_no_step_compiles_before_it_is_asked_for(compiler: Compiler) -> None:
    handle, _, setup = started(blocks(2.0, 2.0))
    assert compiler.graphs == 0
    assert "waits for live trials" in handle.report.of("compile").status
    assert setup.expected_s() > 0
    handle.undo()


def test_once_asked_for_it_is_compiled_tried_and_in_force(compiler: Compiler) -> None:
    handle, arm, setup = started(blocks(2.0, 2.0))
    expected = train(handle)
    taken = set_up(handle, arm, setup)
    assert taken is not None
    assert handle.report.applied("compile") == ["1", "2"]
    assert "2 blocks of 1 kind, compiled and tried in " in handle.report.of("compile").status
    ran = compiler.ran
    torch.testing.assert_close(train(handle), expected)
    assert compiler.ran == ran + 2
    handle.undo()


def test_blocks_that_are_alike_are_compiled_once(compiler: Compiler) -> None:
    handle, arm, setup = started(blocks(2.0, 2.0, 2.0, 2.0))
    set_up(handle, arm, setup)
    assert compiler.graphs == 1
    handle.undo()


def test_blocks_that_compute_with_another_number_are_of_another_kind(compiler: Compiler) -> None:
    handle, arm, setup = started(blocks(2.0, 2.0, 3.0))
    expected = train(handle)
    set_up(handle, arm, setup)
    assert compiler.graphs == 2
    torch.testing.assert_close(train(handle), expected)
    handle.undo()


def test_what_it_would_take_is_told_by_kinds(compiler: Compiler) -> None:
    expected = []
    for factors in ((2.0, 2.0, 2.0), (2.0, 3.0, 4.0)):
        handle, _, setup = started(blocks(*factors))
        expected.append(setup.expected_s())
        handle.undo()
    assert expected[1] == 3 * expected[0]


def test_off_it_runs_eagerly_and_on_again_compiles_nothing_anew(compiler: Compiler) -> None:
    handle, arm, setup = started(blocks(2.0, 2.0))
    set_up(handle, arm, setup)
    graphs, ran = compiler.graphs, compiler.ran
    arm.choose(OFF)
    train(handle)
    assert compiler.ran == ran
    arm.choose("on")
    train(handle)
    assert (compiler.ran, compiler.graphs) == (ran + 2, graphs)
    handle.undo()


def test_kinds_that_the_run_cannot_afford_any_more_stay_eager(compiler: Compiler) -> None:
    handle, arm, setup = started(blocks(2.0, 3.0, 2.0))
    assert set_up(handle, arm, setup, may_take_s=0.0) is not None
    assert handle.report.applied("compile") == ["1", "3"]
    assert "not compiled: those before it took" in handle.report.refused("compile")["2"]
    handle.undo()


def test_where_all_blocks_compute_something_else_nothing_comes_of_it(compiler: Compiler) -> None:
    compiler.run = lambda graph, args: tuple(1.1 * out for out in graph.forward(*args))
    handle, arm, setup = started(blocks(2.0, 2.0))
    expected = train(handle)
    assert set_up(handle, arm, setup) is None
    assert all("other numbers" in why for why in handle.report.refused("compile").values())
    torch.testing.assert_close(train(handle), expected)
    assert list(handle.engine.arms()) == []
    handle.undo()


def test_a_compiler_that_raises_leaves_the_run_as_it_is(compiler: Compiler) -> None:
    def raising(graph: Any, args: Any) -> Any:
        raise RuntimeError("no such instruction")

    compiler.run = raising
    handle, arm, setup = started(blocks(2.0, 2.0))
    expected = train(handle)
    assert set_up(handle, arm, setup) is None
    assert all("no such instruction" in why for why in handle.report.refused("compile").values())
    torch.testing.assert_close(train(handle), expected)
    handle.undo()


def test_random_streams_are_where_they_were(compiler: Compiler) -> None:
    handle, arm, setup = started(blocks(2.0, 2.0))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    set_up(handle, arm, setup)
    assert torch.equal(torch.get_rng_state(), state)
    handle.undo()


def test_what_an_earlier_run_has_tried_is_compiled_without_another_trial(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "numbers", lambda *_: pytest.fail("tried again"))
    handle = accelerate(blocks(2.0, 2.0, 2.0), Plan().replace(**OTHERS_OFF | {"compile": "auto"}), host=CPU)
    verdicts = {site: Verdict("refused", "other numbers") if site == "2" else Verdict("kept") for site in "123"}
    handle.engine.carry_out({"compile": verdicts})
    train(handle)
    (arm,) = handle.engine.arms()
    assert arm.setup is not None
    assert compiler.graphs == 0
    assert set_up(handle, arm, arm.setup) is not None
    assert compiler.graphs == 1
    assert handle.report.applied("compile") == ["1", "3"]
    assert handle.report.refused("compile") == {"2": "other numbers"}
    handle.undo()


@pytest.mark.parametrize(("factors", "kinds"), [((2.0, 2.0, 2.0), 1), ((2.0, 3.0, 2.0), 2)])
def test_blocks_that_an_earlier_run_has_tried_are_compiled_once_a_kind_at_their_first_calls(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, factors: tuple[float, ...], kinds: int
) -> None:
    monkeypatch.setattr(Trial, "numbers", lambda *_: pytest.fail("tried again"))
    model = blocks(*factors)
    expected = model(torch.ones(3, 4)).square().mean()
    handle = accelerate(model, Plan().replace(**OTHERS_OFF | {"compile": "on"}), host=CPU)
    handle.engine.carry_out({"compile": {site: Verdict("kept") for site in "123"}})
    torch.testing.assert_close(train(handle), expected)
    assert (compiler.graphs, compiler.ran) == (kinds, 3)
    train(handle)
    assert (compiler.graphs, compiler.ran) == (kinds, 6)
    assert f"{kinds} graph{'s' * (kinds > 1)} compiled, 0 of them anew" in handle.report.of("compile").details
    handle.undo()


def test_a_block_that_was_sharded_before_its_first_compiled_call_is_called_all_the_same(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = blocks(2.0, 2.0)
    expected = model(torch.ones(3, 4)).square().mean()
    handle = accelerate(model, Plan().replace(**OTHERS_OFF | {"compile": "on"}), host=CPU)
    handle.engine.carry_out({"compile": {site: Verdict("kept") for site in "12"}})
    for module in (compiled, compiled_blocks, compilation):
        monkeypatch.setattr(module, "is_gathered_by_hooks", lambda module: isinstance(module, Block))
    torch.testing.assert_close(train(handle), expected)
    handle.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_was_compiled_in_the_beginning_is_not_counted_as_compiled_anew_later(compiler: Compiler) -> None:
    handle, arm, setup = started(blocks(2.0, 3.0))
    set_up(handle, arm, setup)
    assert "2 graphs compiled, 0 of them anew" in handle.report.of("compile").details
    train(handle, size=5)
    anew = compiler.graphs - 2
    assert anew > 0
    handle.engine.technique(CompilationOnTrial).run.refuse("1", "by a test")  # type: ignore[union-attr]
    train(handle)
    assert f"{anew} of them anew" in handle.report.of("compile").details
    handle.undo()


def test_a_run_undone_in_the_step_that_compiles_is_plain(compiler: Compiler) -> None:
    model = blocks(2.0, 2.0)
    handle, arm, setup = started(model)
    setup.begin(math.inf)
    arm.choose("on")
    handle.undo()
    assert not any("forward" in vars(module) for module in model.modules())
    model(torch.ones(3, 4))
    assert compiler.graphs == 0


def test_only_rank_0_decides_what_is_kept(compiler: Compiler) -> None:
    handle, arm, setup = started(blocks(2.0, 2.0))
    handle.engine.technique(CompilationOnTrial).run.agree = lambda found: {  # type: ignore[union-attr]
        site: Verdict("kept") if site == "1" else Verdict("failed", "failed there") for site in found
    }
    set_up(handle, arm, setup)
    assert handle.report.applied("compile") == ["1"]
    assert handle.report.refused("compile") == {"2": "failed there"}
    handle.undo()


@pytest.mark.parametrize("setting", ["on", "auto"])
@pytest.mark.filterwarnings("ignore:compile was asked for and is not in force")
def test_a_block_that_is_compiled_anew_again_and_again_is_given_back(compiler: Compiler, setting: str) -> None:
    """A whole number that changes in every step is built into the code each time; so may be a shape."""
    model = blocks(2.0, 2.0)
    if setting == "auto":
        handle, arm, setup = started(model)
        set_up(handle, arm, setup)
    else:
        handle = accelerate(model, Plan().replace(**OTHERS_OFF | {"compile": "on"}), host=CPU)
        for _ in range(3):
            train(handle)
    assert handle.report.applied("compile") == ["1", "2"]
    counts = []
    for step in range(15):
        for block in model[1:]:
            block.factor = 3 + step
        train(handle)
        counts.append(compiler.graphs)
    assert handle.report.applied("compile") == []
    assert all("9 graphs were compiled anew" in why for why in handle.report.refused("compile").values())
    assert counts[-1] == counts[9] == counts[0] + 8
    handle.undo()


@pytest.mark.parametrize("trust", ["checked", "unchecked"])
def test_the_report_counts_graphs_and_those_compiled_anew(compiler: Compiler, trust: str) -> None:
    model = blocks(2.0, 2.0)
    handle = accelerate(model, Plan().replace(**OTHERS_OFF | {"compile": "on", "trust": trust}), host=CPU)
    for size in (3, 3, 3, 5):
        train(handle, size)
    assert compiler.graphs > 1
    details = handle.report.of("compile").details
    assert details.startswith(f"{compiler.graphs} graphs compiled, {compiler.graphs - 1} of them anew, in ")
    assert details in str(handle.report)
    handle.undo()


def test_where_kernels_cannot_be_kept_the_report_says_so(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_folder().parent.mkdir()
    kernel_folder().touch()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    handle, arm, setup = started(blocks(2.0, 2.0))
    set_up(handle, arm, setup)
    assert "a later run may have to compile again: " in handle.report.of("compile").details
    handle.undo()


def test_a_block_that_is_also_evaluated_and_sees_a_shorter_batch_stays(compiler: Compiler) -> None:
    model = blocks(2.0, 2.0)
    handle, arm, setup = started(model)
    set_up(handle, arm, setup)
    for size in (3, 2, 3, 5, 7):
        train(handle, size)
        model.eval()
        with handle.step("validate"), torch.no_grad():
            model(torch.ones(size, 4))
        model.train()
    assert handle.report.applied("compile") == ["1", "2"]
    handle.undo()


def test_nothing_of_a_compiled_block_remains_after_undo(compiler: Compiler) -> None:
    model = blocks(2.0, 2.0)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    handle, arm, setup = started(model)
    set_up(handle, arm, setup)
    handle.undo()
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert {name: set(vars(module)) - {"_compiled_call_impl"} for name, module in model.named_modules()} == before
    gone = weakref.ref(model)
    del model, handle, arm, setup
    gc.collect()
    assert gone() is None, "torch keeps every backend of its own, and the model must not hang on ours"


def test_a_deterministic_run_does_not_decide_by_the_clock(determinism_restored: None) -> None:
    torch.use_deterministic_algorithms(True)
    with pytest.warns(UserWarning, match="set compile='on' to compile"):
        accelerate(blocks(2.0, 2.0), Plan().replace(**OTHERS_OFF | {"compile": "auto"}), host=CPU).undo()


def test_live_trials_of_a_loop_ask_for_it_and_note_what_it_took(compiler: Compiler) -> None:
    plan = Plan().replace(**OTHERS_OFF | {"compile": "auto", "trust": "measured"})
    handle = accelerate(blocks(2.0, 2.0), plan, steps=10_000_000, host=CPU)  # which can afford it
    for _ in range(20):
        train(handle)
    assert compiler.graphs == 1
    assert handle.report.applied("compile") == ["1", "2"]
    assert handle.tuning is not None
    assert handle.tuning.setup_s["compile"] > 0
    handle.undo()


def test_a_short_loop_is_told_that_it_cannot_afford_it(compiler: Compiler) -> None:
    plan = Plan().replace(**OTHERS_OFF | {"compile": "auto", "trust": "measured"})
    handle = accelerate(blocks(2.0, 2.0), plan, steps=100, host=CPU)
    for _ in range(20):
        train(handle)
    assert compiler.graphs == 0
    assert "not tried: it would take about 10 s, and trials may cost this run " in str(handle.report)
    handle.undo()


RUN = """
import torch, warnings
warnings.simplefilter("ignore")
from torch import nn
from torch._dynamo.utils import counters
from lightning_accel import Plan, accelerate

torch.manual_seed(0)
model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0) for _ in range(2)))
off = {"memory_format": "off", "inplace_activations": "off"}
handle = accelerate(model, Plan(precision="32-true", techniques=off, compile="on"))
for _ in range(4):
    with handle.step():
        loss = model(torch.ones(2, 8, 16)).square().mean()
    loss.backward()
assert handle.report.applied("compile") == ["0", "1"], handle.report
print("made", counters["inductor"]["fxgraph_cache_miss"], "found", counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_a_second_run_finds_all_kernels_of_the_first_also_after_a_reboot(tmp_path: Path) -> None:
    """Also where attention is edited in the captured graph: TorchInductor keeps what it makes by the graph it gets."""
    if Host.detect("cpu").compiler is None:
        pytest.skip("no C++ compiler here")
    found = []
    for boot in ("first", "second"):
        (tmp_path / boot).mkdir()
        variables = {**os.environ, "TMPDIR": str(tmp_path / boot), "OMP_NUM_THREADS": "1"}
        del variables["TORCHINDUCTOR_CACHE_DIR"]
        run = subprocess.run([sys.executable, "-c", RUN], env=variables, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        words = run.stdout.split()
        found.append((int(words[1]), int(words[3])))
    assert found[0][0] > 0
    assert found[1][0] == 0
    assert found[1][1] > 0
