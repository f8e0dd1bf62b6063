"""What TensorBoard and CSV loggers are told beside metrics, read back from what they have written."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.evidence.phase_names import DATA, REST
from support import measured_runs
from support.console import heard
from support.live_runs import Timed, fit, simulated
from support.measured_runs import Model, loader
from support.tensorboard_files import events, hparams_of

STEPS = 200


def columns_of(folder: str | Path) -> list[str]:
    """The settings that the HParams tab of a TensorBoard on this folder has columns for."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams.backend_context import Context

    runs = EventMultiplexer(tensor_size_guidance={"tensors": 0}).AddRunsFromDirectory(str(folder))
    runs.Reload()
    backend = Context(TBContext(data_provider=MultiplexerDataProvider(runs, str(folder))))
    request = RequestContext()
    known = backend.hparams_from_data_provider(request, "", limit=100)
    experiment = backend.experiment_from_metadata(request, "", False, backend.hparams_metadata(request, ""), known)
    return [info.name for info in experiment.hparam_infos]


def layout_of(folder: str | Path) -> dict[str, dict[str, list[str]]]:
    """Group → chart → tags, of the arrangement of charts."""
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    (event,) = events(folder).Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    return {group.title: {chart.title: list(chart.multiline.tag) for chart in group.chart} for group in layout.category}


def texts_of(folder: str | Path) -> list[tuple[int, str]]:
    """Step → text."""
    found = events(folder).Tensors("accel/summary/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders that TensorBoard's and CSV's loggers have of one run, whose live trials settle on what is faster."""
    folder = tmp_path_factory.mktemp("run")
    board, table = TensorBoardLogger(folder / "tb"), CSVLogger(folder / "csv")
    with pytest.MonkeyPatch.context() as patch, simulated(1.5) as time:
        patch.setenv("LIGHTNING_ACCEL_CACHE", str(folder / "remembered"))
        patch.chdir(folder)
        fit(Timed(time), STEPS // 2, logger=[board, table], callbacks=[SpeedMemoryLogger(every_s=0.0)], max_epochs=2)
    return Path(board.log_dir), Path(table.log_dir)


@pytest.mark.medium
def test_a_text_is_written_where_the_run_settles_and_at_its_end(run: tuple[Path, Path]) -> None:
    (settled, early), (end, late) = texts_of(run[0])
    assert 0 < settled < end == STEPS
    assert all("x [" in text.splitlines()[0] for text in (early, late))
    assert "whole plan  faster" in early
    assert "samples/s" in late.splitlines()[0]
    assert "| whole plan | faster |" in late  # the end's is that of a report
    assert "## Where a step's time goes" in late


@pytest.mark.medium
def test_the_hparams_tab_shows_what_is_on_and_what_came_of_it(run: tuple[Path, Path]) -> None:
    assert hparams_of(run[0] / "accel").items() >= {"accel/precision": "32-true", "accel/speed": "auto"}.items()
    assert "off" not in hparams_of(run[0] / "accel").values()
    assert hparams_of(run[0] / "accel")["accel/run/speed_ratio"] == pytest.approx(1.5, rel=0.1)
    assert {"accel/run/samples_per_sec", "accel/run/peak_memory_mib"} <= hparams_of(run[0] / "accel").keys()


def test_there_are_two_files_of_events_and_no_chart_of_one_point_in_ours(run: tuple[Path, Path]) -> None:
    assert len(list(run[0].rglob("events.out.*"))) == 2
    assert events(run[0] / "accel").Tags()["scalars"] == []


def test_no_experiment_is_told_of_which_would_hide_the_hparams_of_other_runs(run: tuple[Path, Path]) -> None:
    from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG

    for folder in (run[0], run[0] / "accel"):
        assert EXPERIMENT_TAG not in events(folder).summary_metadata


def test_charts_are_arranged_in_groups_of_those_metrics_that_there_are(run: tuple[Path, Path]) -> None:
    layout = layout_of(run[0] / "accel")
    assert list(layout) == ["accel: speed", "accel: step times", "accel: memory", "accel: waiting"]
    assert layout["accel: step times"]["ms"] == [".*accel/step_ms_p50$", ".*accel/step_ms_p95$"]


def test_a_figure_shows_what_a_steps_time_goes_to(run: tuple[Path, Path]) -> None:
    pytest.importorskip("matplotlib")
    (image,) = events(run[0]).Images("accel/step_time")
    assert image.step == STEPS
    assert image.encoded_image_string.startswith(b"\x89PNG")
    drawn = (run[1] / "accel" / "step_time.svg").read_text()
    assert drawn.startswith("<?xml")
    assert drawn.index(f"<!-- {DATA}") < drawn.index("<!-- forward") < drawn.index(f"<!-- {REST}")


def test_csv_has_files_beside_its_metrics(run: tuple[Path, Path]) -> None:
    assert (run[1] / "metrics.csv").is_file()
    assert "| whole plan | faster |" in (run[1] / "accel" / "summary.md").read_text()
    with (run[1] / "accel" / "arms.csv").open(newline="") as file:
        (arm,) = csv.DictReader(file)
    assert arm["accel/verdict"] == "faster"
    assert float(arm["accel/run/speed_ratio"]) == pytest.approx(1.5, rel=0.1)


# -- what is the user's own ----------------------------------------------------------------------------------------


class TimedWithHparams(Timed):
    def __init__(self, time: Any, lr: float = 0.1) -> None:
        super().__init__(time)
        self.save_hyperparameters("lr")


@pytest.fixture(scope="module")
def with_hparams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TensorBoard's folder of a run whose module has hyperparameters of its own."""
    folder = tmp_path_factory.mktemp("with_hparams")
    board = TensorBoardLogger(folder)
    with pytest.MonkeyPatch.context() as patch, simulated(1.5) as time:
        patch.setenv("LIGHTNING_ACCEL_CACHE", str(folder / "remembered"))
        patch.chdir(folder)
        fit(TimedWithHparams(time), logger=board, callbacks=[SpeedMemoryLogger()])
    return Path(board.log_dir)


@pytest.mark.medium
def test_a_modules_own_hyperparameters_are_all_that_the_hparams_tab_shows(with_hparams: Path) -> None:
    assert hparams_of(with_hparams) == {"lr": 0.1}
    assert "hp_metric" in events(with_hparams).Tags()["scalars"]
    assert hparams_of(with_hparams / "accel") == {}
    assert columns_of(with_hparams) == ["lr"]


def test_a_second_experiment_in_a_folder_of_its_own_would_not_be_shown_beside_the_users(tmp_path: Path) -> None:
    """By TensorBoard's own code: why nothing more is told. Should this fail, both can be had at last."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_hparams({"lr": 0.1}, {"loss": 1.0}, run_name="version_0")
        writer.add_hparams({"accel/compared": "compile"}, {"accel/run/speed_ratio": 1.5}, run_name="version_0/accel")
    assert len(columns_of(tmp_path)) == 1


def test_a_users_own_arrangement_of_charts_stays(tmp_path: Path) -> None:
    class Arranges(Callback):
        def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
            trainer.logger.experiment.add_custom_scalars({"mine": {"loss": ["Multiline", ["loss"]]}})

    board = TensorBoardLogger(tmp_path)
    measured_runs.fit(Model(), logger=board, log_every_n_steps=1, callbacks=[Arranges()], max_epochs=2)
    assert layout_of(board.log_dir) == {"mine": {"loss": ["loss"]}}
    assert "accel: speed" in layout_of(Path(board.log_dir) / "accel")


def test_without_the_plugin_there_is_no_text_but_of_speed_and_memory(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path)
    measured_runs.fit(Model(), logger=board, log_every_n_steps=1)
    ((step, text),) = texts_of(board.log_dir)
    assert step == 8
    assert "samples/s" in text
    assert "over plain" not in text
    assert hparams_of(Path(board.log_dir) / "accel") == {}


# -- what never happens --------------------------------------------------------------------------------------------


def test_a_logger_that_cannot_be_told_all_fails_no_run_and_keeps_nothing_from_others(tmp_path: Path) -> None:
    board, table, plugin = TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv"), AccelPlugin()
    Path(board.log_dir).mkdir(parents=True)
    (Path(board.log_dir) / "accel").write_text("where the folder should be")
    with heard() as lines:
        measured_runs.fit(Model(), logger=[table, board], log_every_n_steps=1, plugins=[plugin])
    (said,) = (line for line in lines if "could not be told" in line)
    assert said.startswith("lightning-accel: a logger could not be told all of this run: ")
    assert said.endswith("The run goes on.")
    assert said.removeprefix("lightning-accel: ") in plugin.report.notes
    assert "samples/s" in lines[-1]
    assert len(texts_of(board.log_dir)) == 1
    assert (Path(table.log_dir) / "accel" / "summary.md").is_file()


def test_a_run_that_fails_tells_its_loggers_nothing_more(tmp_path: Path) -> None:
    def fail(module: Model, batch_idx: int) -> None:
        if module.current_epoch == 1:
            raise RuntimeError("mine")

    table = CSVLogger(tmp_path)
    with heard() as lines, pytest.raises(RuntimeError, match="mine"):
        measured_runs.fit(Model(fail), logger=table, log_every_n_steps=1, max_epochs=2)
    assert not (Path(table.log_dir) / "accel" / "summary.md").exists()
    assert not [line for line in lines if "samples/s" in line]


def test_a_fast_development_run_tells_nothing(tmp_path: Path) -> None:
    with heard() as lines:
        measured_runs.fit(Model(), loader(), logger=CSVLogger(tmp_path), fast_dev_run=True)
    assert lines == []
    assert not list(tmp_path.rglob("summary.md"))
