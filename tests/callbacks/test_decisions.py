"""What trials and techniques decide, as events: each once, when it was decided, and in the record of a killed run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.callbacks._announcements import Decisions
from lightning_accel.core.report import Report, TechniqueReport
from lightning_accel.core.states import SiteChanged
from lightning_accel.evidence.events import PlanHeld, TrialDecided
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.evidence.report_model import page_of
from lightning_accel.experiment.pair_test import RatioInterval
from lightning_accel.tuning.comparison import Result
from lightning_accel.tuning.tuning_result import Tuning
from support.lightning_models import Supervised, Transformer, tokens
from support.live_runs import Timed, simulated
from support.live_runs import fit as fit_live
from support.reported_runs import make_trainer


def decisions(**precision: Any) -> Decisions:
    trainer: Any = SimpleNamespace(precision_plugin=SimpleNamespace(**precision))
    return Decisions(trainer)


def test_of_several_changes_of_a_site_the_last_is_told_once() -> None:
    report = Report()
    found, sites = decisions(report=report), report.of("compile").sites
    for state, reason in (("PROPOSED", "asked"), ("ON", "in force")):
        sites.change("block", state, reason)  # type: ignore[arg-type]
    assert found.new(None) == [SiteChanged("compile", "block", "PROPOSED", "ON", "in force")]
    assert found.new(None) == []
    sites.change("block", "OFF", "slower")
    assert found.new(None) == [SiteChanged("compile", "block", "ON", "OFF", "slower")]


def test_a_technique_that_is_taken_back_in_mid_run_has_no_site_on() -> None:
    report = Report()
    found = decisions(report=report)
    for site, state in (("a", "ON"), ("b", "OFF")):
        report.of("compile").sites.change(site, state, "x")  # type: ignore[arg-type]
    found.new(None)
    report.techniques["compile"] = TechniqueReport("compile", "reverted", "taken back: no memory")
    assert found.new(None) == [SiteChanged("compile", "a", "ON", "OFF", "taken back: no memory")]
    assert found.new(None) == []


def test_a_trial_is_told_when_it_has_been_decided_and_the_plan_when_it_changes() -> None:
    tuning = Tuning({"compile": "on"})
    found = decisions(tuning=tuning)
    assert found.new(None) == []  # of a plan that nothing was decided of
    won = Result("compile", "faster", RatioInterval(1.5, 1.4, 1.6), 24, {}, {"compile": "on"}, (5, 6))
    tuning.results["compile"], tuning.setup_s["compile"] = won, 3.0
    told = TrialDecided(**vars(won), setup_s=3.0)
    assert found.new(None) == [told, PlanHeld(choices={"compile": "on"})]
    tuning.whole, tuning.is_settled = won, True
    assert found.new(20) == [PlanHeld(choices={"compile": "on"}, whole=won, is_settled=True, step=20)]


@pytest.mark.medium
def test_sites_of_a_killed_run_are_known(tmp_path: Path) -> None:
    plugin = AccelPlugin(precision="32-true", memory={"checkpoint": "full"}, techniques={"flash_attention": "sdpa"})
    make_trainer(tmp_path, plugin).fit(Supervised(Transformer()), tokens())
    whole = read_record(tmp_path)
    for name, technique in plugin.report.techniques.items():
        assert whole.reasons(name, "ON") == technique.changes
        assert whole.reasons(name, "OFF") == technique.refusals
    lines = whole.path.read_text(encoding="utf-8").splitlines()
    assert not any(site in lines[-1] for site in plugin.report.applied("gradient_checkpointing"))  # told once
    whole.path.write_text("".join(f"{line}\n" for line in lines[: lines.index(next(filter(_is_steps, lines)))]))
    killed = read_record(tmp_path)
    assert (killed.report, killed.sites) == (None, whole.sites)


def _is_steps(line: str) -> bool:
    return line.startswith('{"kind": "steps"')


@pytest.mark.medium
def test_live_trials_of_a_killed_run_are_on_its_page(tmp_path: Path) -> None:
    with simulated(1.5) as time:
        fit_live(Timed(time), logger=CSVLogger(tmp_path), callbacks=[SpeedMemoryLogger()])
    path = read_record(tmp_path).path
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: text.rindex("\n", 0, -1) + 1])
    page = page_of(read_record(tmp_path))
    assert [(trial.name, trial.verdict) for trial in page.trials] == [("whole plan", "faster")]
    assert "over plain" in page.headline
