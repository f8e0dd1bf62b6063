"""The report that a fit leaves: where it was asked for, and wherever it died of a lack of memory."""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin, Plan
from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.callbacks.gpu_stats import GpuStats, told_by_cards
from lightning_accel.core.report import AccelWarning
from lightning_accel.evidence import peaks
from lightning_accel.evidence import report_model as pages
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.evidence.report_model import page_of
from lightning_accel.memory.oom_report import StepMemoryError
from support.live_runs import Timed, simulated
from support.live_runs import fit as fit_live
from support.plugin.tight import Batches, Tight
from support.reported_runs import Nested, make_trainer, vectors
from support.technique_table import off

OFF = off()


@pytest.fixture(autouse=True)
def _peaks_measured_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine, for every report: no test asks how high they are, and to measure them well takes a second."""
    monkeypatch.setitem(peaks._SIZE, "cpu", 64)
    monkeypatch.setitem(peaks._COPIED, "cpu", 1 << 16)


def fit(
    folder: Path | None, model: LightningModule | None = None, data: Any = None, *, accel: Any = None, **options: Any
) -> AccelPlugin:
    """Trains with the plugin, of which nothing but the given settings is on."""
    plugin = AccelPlugin.from_plan(Plan().replace(**OFF | (accel or {})))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccelWarning)
        make_trainer(folder, plugin, **options).fit(model or Nested(), vectors(8) if data is None else data)
    return plugin


def files(folder: Path, ending: str = "*") -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(f"*.{ending}") if path.is_file())


# -- where it was asked for ----------------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_notebook_shows_the_page_of_a_run_that_has_left_a_record(tmp_path: Path) -> None:
    plugin = fit(tmp_path)
    assert plugin.report._repr_html_().startswith('<iframe srcdoc="')
    assert "&lt;dl class=&quot;facts&quot;&gt;" in copy.deepcopy(plugin).report._repr_html_()
    for record in tmp_path.rglob("*.jsonl"):
        record.unlink()
    assert plugin.report._repr_html_().startswith("<pre>")


@pytest.mark.medium
@pytest.mark.parametrize("form", ["html", "md", "json"])
def test_a_fit_leaves_its_report_in_the_form_that_was_asked_for(tmp_path: Path, form: str) -> None:
    fit(tmp_path / "logs", accel={"report": f"out/report.{form}"})
    text = (tmp_path / "out" / f"report.{form}").read_text(encoding="utf-8")
    assert "A run of 8 steps: nothing was measured against plain" in text
    assert "GFLOP/s" in text or json.loads(text)["peaks"]["float32_flops"] > 0  # measured when it was over


def test_a_path_serves_as_well() -> None:
    assert Plan(report=Path("out") / "report.md").report == "out/report.md"


@pytest.mark.parametrize("value", ["report.pdf", "report", 3])
def test_another_ending_is_refused_at_once(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"report=.*\.html, \.md, \.json"):
        AccelPlugin(report=value)


@pytest.mark.medium
def test_without_a_logger_the_record_is_beside_the_report(tmp_path: Path) -> None:
    fit(None, accel={"report": "out/report.html"})
    assert (tmp_path / "out" / "report.html").exists()
    assert read_record(tmp_path / "out").num_steps == 8


@pytest.mark.medium
def test_the_second_fit_takes_the_place_of_the_first(tmp_path: Path) -> None:
    for batches in (8, 9):
        fit(None, data=vectors(batches), accel={"report": "report.md"})
    assert (tmp_path / "report.md").read_text(encoding="utf-8").startswith("# A run of 9 steps")


def test_a_run_that_raises_has_a_report_that_says_so(tmp_path: Path) -> None:
    class Fails(Nested):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 5:
                raise ValueError("no more")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="no more"):
        fit(None, Fails(), accel={"report": "report.md"})
    assert (tmp_path / "report.md").read_text(encoding="utf-8").startswith("# Ended after 5 steps: ValueError: no more")


@pytest.mark.medium
def test_live_trials_are_in_it_with_the_step_at_which_they_had_settled(tmp_path: Path) -> None:
    with simulated(1.5) as time:
        fit_live(Timed(time), logger=CSVLogger(tmp_path), callbacks=[SpeedMemoryLogger()])
    page = page_of(read_record(tmp_path))
    assert [(trial.name, trial.verdict) for trial in page.trials] == [("whole plan", "faster")]
    (won,) = [one for one in page.techniques if one.trial is not None]  # the only one: the whole plan is its own trial
    assert (won.came_of_it, won.trial) == ("kept", page.trials[0])
    assert page.settled_step is not None
    assert 0 < page.settled_step < 200
    assert 1.2 < float(page.headline.partition("x")[0]) < 1.8


@pytest.mark.medium
def test_yaml_asks_for_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning_accel import AccelCLI

    settings = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    config = {
        "trainer": {**settings, "enable_progress_bar": False},
        "accel": Plan().replace(**OFF, report="out/report.html").to_dict(),
        "seed_everything": 0,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))  # which is YAML
    monkeypatch.setattr(sys, "argv", ["train.py"])
    AccelCLI(WithData, args=["fit", "--config=run.yaml"])
    assert (tmp_path / "out" / "report.html").exists()


class WithData(Nested):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return vectors(8)


# -- where it was not ----------------------------------------------------------------------------------------------


def test_who_asks_for_none_gets_none(tmp_path: Path) -> None:
    fit(tmp_path / "logs")
    assert files(tmp_path, "html") == []


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_evaluation_leaves_none_as_nothing_is_trained(tmp_path: Path, stage: str) -> None:
    class Predicts(Nested):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.body(batch)

    plugin = AccelPlugin.from_plan(Plan().replace(**OFF, report="report.html"))
    getattr(make_trainer(tmp_path / "logs", plugin), stage)(Predicts(), vectors(2))
    assert files(tmp_path, "html") == []


def test_a_rehearsal_leaves_none(tmp_path: Path) -> None:
    fit(None, accel={"report": "report.html"}, fast_dev_run=True)
    assert files(tmp_path) == []


# -- where it cannot be written ------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize(
    "has_logger", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["with a logger", "without"]
)
def test_where_the_path_cannot_be_written_it_is_beside_the_record(tmp_path: Path, has_logger: bool) -> None:
    (tmp_path / "file").write_text("in the way")
    plugin = fit(tmp_path / "logs" if has_logger else None, accel={"report": "file/report.html"})
    (record,) = files(tmp_path, "jsonl")
    assert files(tmp_path, "html") == [record.replace(".jsonl", ".html")]
    note = plugin.report.notes[-1]
    assert note.startswith("report='file/report.html' cannot be written (")
    assert note.endswith(".html")


@pytest.mark.medium
def test_a_report_that_cannot_be_made_is_said_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(pages, "page_of", fails)
    plugin = fit(None, accel={"report": "report.html"})
    assert plugin.report.notes[-1] == "this run's report could not be written: RuntimeError: a fault of ours"


# -- out of memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "out/report.html"], ids=["not asked for", "asked for"])
@pytest.mark.parametrize("has_logger", [True, False], ids=["with a logger", "without"])
def test_a_run_that_dies_of_a_lack_of_memory_leaves_a_report(
    tmp_path: Path, has_logger: bool, asked: str | None
) -> None:
    accel = {"precision": "32-true", **({"report": asked} if asked else {})}
    folder = tmp_path / "logs" if has_logger else None
    with pytest.raises(StepMemoryError):
        fit(folder, Tight(most=3), DataLoader(Batches(), batch_size=None), accel=accel, default_root_dir=tmp_path)
    (path,) = files(tmp_path, "html")
    assert path == asked or (asked is None and "accel/" in path)
    text = (tmp_path / path).read_text(encoding="utf-8")
    assert "simulated: Tried to allocate 5.00 GiB." in text.partition("Who asked:")[0]
    for part in ("Who asked:", "What held it, of", "What to do, cheapest first:", "DataLoader(batch_size="):
        assert part in text


class Evaluates(Tight):
    """Whose evaluation takes as much as its training."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    test_step = predict_step = validation_step


@pytest.mark.parametrize("has_logger", [True, False], ids=["with a logger", "without"])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_that_dies_of_a_lack_of_memory_leaves_a_report(
    tmp_path: Path, stage: str, has_logger: bool
) -> None:
    plugin = AccelPlugin.from_plan(Plan().replace(**OFF | {"precision": "32-true"}))
    trainer = make_trainer(tmp_path / "logs" if has_logger else None, plugin, default_root_dir=tmp_path)
    with pytest.raises(StepMemoryError):
        getattr(trainer, stage)(Evaluates(most=3), DataLoader(Batches(), batch_size=None))
    (path,) = files(tmp_path, "html")
    assert path.startswith("logs/" if has_logger else "accel/")
    text = (tmp_path / path).read_text(encoding="utf-8")
    assert "Out of memory: simulated: Tried to allocate 5.00 GiB." in text
    kind = "validation" if stage == "validate" else stage
    assert f"A {kind} step ran out of memory: it keeps nothing for a backward pass" in text
    assert all(part in text for part in ("Who asked:", "What held it, of", "DataLoader(batch_size="))


def test_it_does_not_take_the_place_of_a_trainings_report(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("the training's")
    plugin = AccelPlugin.from_plan(Plan().replace(**OFF | {"precision": "32-true", "report": "report.html"}))
    trainer = make_trainer(None, plugin, default_root_dir=tmp_path)
    with pytest.raises(StepMemoryError):
        trainer.validate(Evaluates(most=3), DataLoader(Batches(), batch_size=None))
    assert (tmp_path / "report.html").read_text() == "the training's"
    assert [name.partition("/")[0] for name in files(tmp_path, "html")] == ["accel", "report.html"]


def test_with_a_logger_of_the_users_own_it_leaves_one_all_the_same(tmp_path: Path) -> None:
    plugin = AccelPlugin.from_plan(Plan().replace(**OFF | {"precision": "32-true"}))
    trainer = make_trainer(None, plugin, default_root_dir=tmp_path, callbacks=[SpeedMemoryLogger()])
    with pytest.raises(StepMemoryError):
        trainer.validate(Evaluates(most=3), DataLoader(Batches(), batch_size=None))
    assert len(files(tmp_path, "html")) == 1


def test_log_false_leaves_an_evaluation_without(tmp_path: Path) -> None:
    plugin = AccelPlugin.from_plan(Plan().replace(**OFF | {"precision": "32-true", "report": False}))
    with pytest.raises(StepMemoryError):
        make_trainer(None, plugin, callbacks=[], default_root_dir=tmp_path).validate(
            Evaluates(most=3), DataLoader(Batches(), batch_size=None)
        )
    assert files(tmp_path) == []


def test_the_look_at_validation_before_a_fit_leaves_a_report_beside_its_logs(tmp_path: Path) -> None:
    plugin = AccelPlugin.from_plan(Plan().replace(**OFF | {"precision": "32-true"}))
    trainer = make_trainer(tmp_path / "logs", plugin, default_root_dir=tmp_path)
    batches = DataLoader(Batches(), batch_size=None)
    with pytest.raises(StepMemoryError):
        trainer.fit(Evaluates(most=3), batches, batches)
    (path,) = files(tmp_path, "html")
    assert path.startswith("logs/")
    assert "A validation step ran out of memory" in (tmp_path / path).read_text(encoding="utf-8")


def test_a_run_that_found_a_way_out_leaves_none(tmp_path: Path) -> None:
    accel = {"precision": "32-true", "memory": {"on_oom": "split"}}
    fit(tmp_path / "logs", Tight(most=3), DataLoader(Batches(), batch_size=None), accel=accel)
    assert files(tmp_path, "html") == []


# -- what is in its record -----------------------------------------------------------------------------------------


def test_losses_that_are_no_numbers_are_reported_as_that(tmp_path: Path) -> None:
    class Diverges(Nested):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (math.inf if batch_idx > 3 else 1.0)

    make_trainer(tmp_path).fit(Diverges(), vectors(8))
    assert "the loss was no number" in page_of(read_record(tmp_path)).remarks[0]


def test_what_the_cards_said_is_put_together_over_epochs() -> None:
    stats = GpuStats()
    names = ("accel/gpu/power_w_mean", "accel/gpu/power_w_max")
    stats.history += [dict(zip(names, values, strict=True)) for values in ((100.0, 150.0), (200.0, 250.0))]
    trainer = make_trainer(None, callbacks=[stats])
    assert told_by_cards(trainer) == {"power_w_mean": 150.0, "power_w_max": 250.0}


@pytest.mark.gpu
def test_on_a_gpu_what_the_allocator_has_taken_is_told_beside_the_peak(tmp_path: Path) -> None:
    make_trainer(tmp_path, accelerator="gpu", max_epochs=2).fit(Nested(), vectors(8))
    memory = page_of(read_record(tmp_path)).memory
    assert memory.reserved_bytes is not None
    assert 0 < memory.peak_bytes <= memory.reserved_bytes < memory.device_bytes
    assert memory.headroom_bytes == memory.device_bytes - memory.reserved_bytes
