"""Two processes train as one does, and decide together."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from support.plugin.two_ranks import RUNS, SLOW, train, weights
from support.scripts import SUPPORT, run_script

pytestmark = [pytest.mark.numbers, pytest.mark.medium]

# Their numbers are those of "channels_last" or "attention" once their layout is taken back, or given up.
SHOWN_BY_OTHERS = ("views, no rebuilt buckets", "refused by rank 0", "attention, by the clock", "accel_ddp, views")


QUICK = [run for run in RUNS if run not in SLOW]

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder in which a run of ``two_ranks.py`` left what each rank got, and it and those beside it printed."""

    @functools.cache
    def launched(slow: bool) -> Path:
        folder = tmp_path_factory.mktemp("two_ranks")
        printed = run_script(SUPPORT / "plugin" / "two_ranks.py", folder, *(SLOW if slow else QUICK))
        (folder / "printed.txt").write_text(printed)
        return folder

    return lambda run: launched(run in SLOW)


def of_rank(folders: Folders, run: str, rank: int) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folders(run) / f"{run}.{rank}.json").read_text())
    return said


def each(runs: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", [pytest.param(r, marks=[pytest.mark.slow] * (r in SLOW)) for r in runs])


@each(RUNS)
def test_both_ranks_decide_the_same(two_ranks: Folders, run: str) -> None:
    first, second = (of_rank(two_ranks, run, rank)["report"] for rank in (0, 1))
    for report in (first, second):
        del report["techniques"]["allocator"]  # each counts the pages of its own process
    assert first == second


@each(RUNS)
def test_both_ranks_hold_the_same_weights(two_ranks: Folders, run: str) -> None:
    assert of_rank(two_ranks, run, 0)["weights"] == of_rank(two_ranks, run, 1)["weights"]


@pytest.mark.filterwarnings("ignore:memory_format was asked for and is not in force")
@each([run for run in RUNS if run not in ("refused by rank 1", *SHOWN_BY_OTHERS)])
def test_two_processes_train_as_one_on_the_same_global_batch(two_ranks: Folders, run: str) -> None:
    ranks = [of_rank(two_ranks, run, rank) for rank in (0, 1)]
    is_exact = ranks[0]["report"]["techniques"]["precision"]["status"].startswith("32-true")
    module, _ = train(run, 8, devices=1)
    losses = [sum(pair) / 2 for pair in zip(ranks[0]["losses"], ranks[1]["losses"], strict=True)]
    assert losses == pytest.approx(module.losses, rel=1e-4 if is_exact else 2e-2)
    if is_exact:
        assert ranks[0]["weights"] == pytest.approx(weights(module), rel=1e-4, abs=1e-5)


@each(["channels_last", "half", "accel_ddp, half"])
def test_channels_last_is_in_force(two_ranks: Folders, run: str) -> None:
    assert of_rank(two_ranks, run, 0)["report"]["techniques"]["memory_format"]["applied"]


@each(["attention", "attention, checkpointed"])
def test_flash_attention_is_in_force(two_ranks: Folders, run: str) -> None:
    said = of_rank(two_ranks, run, 1)["report"]["techniques"]["flash_attention"]
    assert list(said["applied"]) == ["net.layers.0", "net.layers.1", "net.layers.2"]


@each(["checkpointing", "unused", "attention, checkpointed", "accel_ddp, checkpointed"])
def test_checkpointing_is_in_force(two_ranks: Folders, run: str) -> None:
    assert len(of_rank(two_ranks, run, 0)["report"]["techniques"]["gradient_checkpointing"]["applied"]) == 3


def test_both_ranks_run_the_plan_that_rank_0_made(two_ranks: Folders) -> None:
    plans = [of_rank(two_ranks, "budget", rank)["report"]["techniques"]["memory_budget"] for rank in (0, 1)]
    assert plans[0] == plans[1]
    assert "measured" in plans[0]["status"]
    assert len(plans[0]["applied"]) in (1, 2, 3)
    assert "not measured" not in plans[0]["details"]


@each(["views", "views, no rebuilt buckets", "refused by rank 0", "refused by rank 1", "accel_ddp, views"])
def test_a_layout_is_taken_back_on_both(two_ranks: Folders, run: str) -> None:
    """DDP's buckets must not notice: they would permute the gradients of weights that changed their strides."""
    for rank in (0, 1):
        assert not of_rank(two_ranks, run, rank)["report"]["techniques"]["memory_format"]["applied"]


@each(RUNS)
def test_modules_are_given_back(two_ranks: Folders, run: str) -> None:
    assert of_rank(two_ranks, run, 0)["instance"] == of_rank(two_ranks, run, 1)["instance"] == []


def test_every_run_says_in_one_line_what_has_come_of_it(two_ranks: Folders) -> None:
    printed = (two_ranks("auto") / "printed.txt").read_text().splitlines()
    assert sum("lightning-accel: " in line and "samples/s" in line for line in printed) == len(QUICK)


SPAWNED = """
import sys, torch
sys.path.insert(0, {tests!r})
from support.plugin.two_ranks import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    module, trainer = train({run!r}, 4, devices=2, strategy="ddp_spawn")
    print("weights", sum(p.detach().abs().sum().item() for p in module.parameters()))
"""


@pytest.mark.slow
@each(["channels_last", "half"])
def test_spawned_processes_get_the_plugin(tmp_path: Path, two_ranks: Folders, run: str) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED.format(tests=str(Path(__file__).parent.parent), run=run))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = next(line for line in done.stdout.splitlines() if line.startswith("weights"))
    expected = sum(map(abs, of_rank(two_ranks, run, 0)["weights"]))
    assert float(said.split()[1]) == pytest.approx(expected, rel=1e-5)
