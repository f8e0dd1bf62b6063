"""The scripts of benchmarks/: they can run, and what they measure has its place in docs/results."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel import Plan
from lightning_accel.core.compiled import is_compiled
from lightning_accel.techniques.arms import Arm
from support.live_runs import OTHERS_OFF

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ON_GPU = sorted(path.stem for path in BENCHMARKS.glob("gpu*.py"))
ON_CPU = sorted(path.stem for path in BENCHMARKS.glob("[!_]*.py") if path.stem not in {*ON_GPU, "render"})
DRY = [name for name in ON_GPU if name != "gpu_tuning"]  # its own is in tests/tuning/test_measuring.py
QUICK = {"gpu_deploying", "gpu_offloading", "gpu_preprocessing"}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports one of the scripts."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of TorchInductor, which takes many seconds: graphs as they were captured."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        "lightning_accel.core.compiled.compile_with_inductor", lambda graph, inputs, options: graph.forward
    )
    yield
    torch._dynamo.reset()


# -- docs/results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ON_CPU)
def test_what_make_bench_measures_has_a_title_and_a_remark(benchmark: Callable[[str], Any], script: str) -> None:
    render = benchmark("render")
    assert render.TITLES[script]
    assert render.REMARKS[script]


@pytest.mark.parametrize("script", ON_GPU)
def test_what_make_gpu_measures_stands_in_its_order(benchmark: Callable[[str], Any], script: str) -> None:
    """The models come first, whose files have no kind."""
    (name,) = re.findall(r'\bwrite\("([a-z-]*)"', (BENCHMARKS / f"{script}.py").read_text(encoding="utf-8"))
    assert (benchmark("render")._KINDS.search(f"gpu-{name}-h100-torch-2.11.0.md") is not None) == (name != "")


def test_make_gpu_runs_all_of_them() -> None:
    script = (BENCHMARKS.parent / "tests" / "on_gpu.py").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^BENCHMARKS = \((.*?)^\)", script, re.MULTILINE | re.DOTALL)
    assert sorted(["gpu_smoke", *re.findall(r'"(\w+)"', lines)]) == ON_GPU


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@contextmanager
def its_own_process(folder: Path) -> Iterator[None]:
    """Takes back what scripts set for the process that they are alone in."""
    with pytest.MonkeyPatch.context() as patch, torch.backends.cudnn.flags(benchmark=False):
        for name, value in {"LIGHTNING_ACCEL_CACHE": str(folder / "cache"), "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setenv(name, value)
        try:
            yield
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


@pytest.mark.medium
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DRY]
)
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("default")  # what a script's tiny run is warned of is no error of ours
def test_a_dry_run_goes_through_and_leaves_its_table(
    benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--dry-run", "--out", str(tmp_path)])
    with its_own_process(tmp_path):
        benchmark(script).main()
    suffixes = sorted(path.suffix for path in tmp_path.glob("gpu-*"))
    assert suffixes == [".json", ".md"]


# -- deploying --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_dry_run_of_serving_goes_through_and_leaves_its_table(
    benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn.datasets")
    monkeypatch.setattr(sys, "argv", ["deploying.py", "--dry-run", "--json", str(tmp_path)])
    script = benchmark("deploying")
    script.main()
    (written,) = (tmp_path / "deploying").iterdir()
    record = json.loads(written.read_text(encoding="utf-8"))
    assert record["columns"] == list(script.COLUMNS)
    assert {row[1].strip("*") for row in record["rows"]} >= {"eager", "int8-dynamic", "onnx", "onnx+int8-dynamic"}
    assert len({row[0] for row in record["rows"]}) == 3


# -- downstream -------------------------------------------------------------------------------------------------------


def test_a_dry_run_of_downstream_lists_models_and_installs_nothing(
    benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = benchmark("downstream")
    monkeypatch.setattr(script, "installed", lambda package: pytest.fail("it installs"))
    monkeypatch.setattr(sys, "argv", ["downstream.py", "--dry-run", "--models", "scvi,nhits"])
    script.main()
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"scvi-tools", "neuralforecast"}


def test_each_fit_is_beside_the_same_of_plain(benchmark: Callable[[str], Any]) -> None:
    def fits(*walls: float) -> dict[str, dict[str, float]]:
        measured = [{"steps": 5, "wall_s": wall, "cpu_s": 2 * wall} for wall in walls]
        return dict(zip(("fresh", "second", "new process"), measured, strict=True))

    one = {"plain": fits(3.0, 1.0, 2.0), "defaults": fits(1.5, 1.5, 4.0)}
    ratios = ["2.00x", "0.67x", "0.50x"]
    assert benchmark("downstream").row("model", "defaults", [one]) == [
        "model",
        "defaults",
        "5",
        "200.0",
        *ratios,
        *ratios,
    ]


# -- techniques --------------------------------------------------------------------------------------------------------


def test_all_techniques_at_once_are_a_plan(benchmark: Callable[[str], Any]) -> None:
    plan = benchmark("techniques").plan_with_all()
    assert isinstance(plan, Plan)
    assert [plan.of(one) for one in ("compile", "threads", "loss")] == ["auto", "auto", "auto"]
    assert plan.trust == "checked"
    assert plan.is_off("graphs")  # which no plan has beside a compiler


class Blocks(nn.Module):
    """Two blocks that are alike, so that one is compiled for both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loop_of_blocks(benchmark: Callable[[str], Any]) -> Any:
    loops, model = benchmark("_tuning_loop"), Blocks()
    batches = iter(lambda: torch.ones(4, 8), None)
    task = loops.Task(model, lambda batch: model(batch).square().mean(), batches)
    return loops.AcceleratedLoop(task, Plan().replace(**OTHERS_OFF | {"compile": "auto"}, trust="checked"))


@pytest.mark.usefixtures("compiler")
def test_compilation_put_in_force_compiles_once_and_can_be_taken_back(benchmark: Callable[[str], Any]) -> None:
    loop = loop_of_blocks(benchmark)
    blocks = loop.handle.model.blocks
    seen = []
    for combination in ((("compile", "on"),), (), (("compile", "on"),)):
        loop.put(combination)
        setup_s = dict(loop.setup_s)
        loop.step()
        seen.append([is_compiled(block) for block in blocks])
    assert seen == [[True, True], [False, False], [True, True]]
    assert loop.handle.report.applied("compile") == ["blocks.0", "blocks.1"]
    assert setup_s == loop.setup_s
    assert setup_s["compile"] > 0
    loop.close()


class Expensive:
    """A setup of which nothing must begin."""

    def expected_s(self) -> float:
        return 100.0


def test_what_would_cost_too_much_to_set_up_is_left_out_and_said(benchmark: Callable[[str], Any]) -> None:
    script = benchmark("techniques")
    arm = Arm("compile", ("on",), choose=lambda choice: None, setup=Expensive())  # type: ignore[arg-type]
    found = script.set_up(loop_of_blocks(benchmark), arm, (), may_take_s=50.0)
    assert found.alone == "left out for its cost: it would take about 100 s"


# -- a second run ------------------------------------------------------------------------------------------------------


def a_run(step_ms: float, first_ms: float, *, compiled: bool = True) -> dict[str, Any]:
    return {
        **{"step_ms": [first_ms] * 50 + [step_ms] * 25, "compiled": [compiled] * 75, "choices": {"compile": "on"}},
        **{"imports_s": 8.0, "to_first_s": 1.0, "settled": "", "report": "compile: not here"},
    }


def test_a_second_run_is_held_against_the_first_ones_settled_step(benchmark: Callable[[str], Any]) -> None:
    """Plain in its second run, and so twice as slow from first to last, it would pass by its own settled step."""
    by_first, by_its_own, *_ = benchmark("second_run").figures(a_run(200.0, 200.0, compiled=False), 100.0)
    assert (by_first, by_its_own) == ("2.00", "1.00")


@pytest.mark.parametrize("compiles", ["on", "auto"])
def test_a_second_run_that_was_to_be_compiled_and_was_not_is_an_error(
    benchmark: Callable[[str], Any], compiles: str
) -> None:
    complain = benchmark("second_run").complain
    complain("gpt", compiles, a_run(1.0, 1.0), a_run(1.0, 1.0))
    with pytest.raises(RuntimeError, match="not in force at the end of the second run"):
        complain("gpt", compiles, a_run(1.0, 1.0), a_run(1.0, 1.0, compiled=False))


# -- short fits --------------------------------------------------------------------------------------------------------


def test_a_second_short_fit_is_held_against_plains_second_and_the_worst_run_counts(
    benchmark: Callable[[str], Any],
) -> None:
    script = benchmark("short_runs")
    costs = {"plain": 3.0, "plain again": 1.0, "fresh": 4.0, "again": 1.25, "in a new process": 3.5}
    rounds = [{run: (wall_s, 1.0) for run, wall_s in costs.items()}]
    assert script.ratios(rounds, "again", 0) == [0.8]
    assert (script.worst(rounds), script.later_s(rounds)) == (0.75, 1.0)
    assert len(script.row("a model", 20, rounds)) == len(script.COLUMNS)


# -- a linear head -----------------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize(("seconds", "rounds"), [pytest.param(1e9, 3, marks=pytest.mark.slow), (0.0, 2)])
def test_every_side_of_the_head_has_as_many_rounds_as_the_time_allows(
    benchmark: Callable[[str], Any], seconds: float, rounds: int
) -> None:
    script = benchmark("linear_cross_entropy")
    run = script.measure(8192, 8, 1024, torch.float32, torch.device("cpu"), 3, seconds)
    assert run.rounds == rounds
    assert (run.torch_ratio is not None) == hasattr(torch.nn.functional, "linear_cross_entropy")
    assert len(script.row(run, 0.0)) == len(script.COLUMNS)
