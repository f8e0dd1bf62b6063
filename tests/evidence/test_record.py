"""The record that a run leaves beside its logs: what is in it, and that it can be read whatever became of the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from pydantic import TypeAdapter

from lightning_accel import AccelPlugin
from lightning_accel.evidence.events import KINDS, EpochEnded, RunStarted, StepMeasured, in_pieces
from lightning_accel.evidence.phase_names import DATA
from lightning_accel.evidence.record import Record, RecordWriter
from lightning_accel.evidence.record_reader import RecordError, read_record
from report_schema import RECORD_SCHEMA, record_schema, schema
from support.measured_runs import BATCH_SIZE, Folder, Model, fit, loader

HEADER = RunStarted(
    started="2026-11-23T12:00:00+00:00",
    command=["train.py"],
    model="mine.Model",
    parameters=18,
    settings=None,
    precision="32-true",
    strategy="SingleDeviceStrategy",
    machine="a CPU (cpu)",
    cores=2,
    world_size=1,
    versions={"torch": "2.13.0"},
)
SOME = StepMeasured(
    first=1, last=2, timed=2, cycle_ms=[1.0, 2.0], wait_ms=[0.1, 0.2], samples=8, losses=[(1, 3.0), (2, 2.5)]
)


class Remembers(Model):
    """Keeps its losses."""

    def __init__(self, hook: Any = lambda module, batch_idx: None) -> None:
        super().__init__(hook)
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(math.nan if loss is None else loss.item())
        return loss


def written(folder: Path, *lines: Any) -> Path:
    writer = RecordWriter(folder / "accel" / "20261123-1.jsonl", HEADER)
    for line in lines:
        writer.write(line)
    return writer.path


def recorded(folder: Path, model: Model | None = None, **options: Any) -> Record:
    fit(model or Model(), logger=Folder(folder), **options)
    return read_record(folder)


def test_a_run_leaves_its_record_beside_its_logs(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    fit(Model(), logger=logger, max_epochs=2)
    (path,) = Path(logger.log_dir).glob("accel/*.jsonl")
    assert read_record(tmp_path).path == path


@pytest.mark.medium
def test_every_line_is_an_event_by_the_schema(tmp_path: Path) -> None:
    lines = recorded(tmp_path, max_epochs=2).path.read_text().splitlines()
    for line in map(json.loads, lines):
        kind = line.pop("kind")
        TypeAdapter(KINDS[kind]).validate_python(line)
        assert line.keys() == KINDS[kind].__dataclass_fields__.keys()


def test_the_schema_of_a_line_is_that_of_the_code() -> None:
    if "description" not in schema():
        pytest.skip("this pydantic leaves out what dataclasses say of themselves")
    assert json.loads(RECORD_SCHEMA.read_text(encoding="utf-8")) == record_schema(), "write it anew: make stub"


def test_it_says_what_ran_and_how_it_ended(tmp_path: Path) -> None:
    record = recorded(tmp_path)
    header = record.header
    assert header.model.endswith("measured_runs.Model")
    assert (header.parameters, header.world_size, header.precision) == (18, 1, "32-true")
    assert header.versions["torch"] == torch.__version__
    assert (header.settings, record.status) == (None, "finished")


def test_losses_are_those_of_the_steps(tmp_path: Path) -> None:
    model = Remembers()
    record = recorded(tmp_path, model, max_epochs=2)
    assert record.num_steps == 16
    assert record.losses == pytest.approx(dict(enumerate(model.losses, start=1)))


def test_of_many_steps_it_keeps_the_losses_of_some_at_numbers_that_other_runs_keep_too(tmp_path: Path) -> None:
    steps = sorted(recorded(tmp_path, data=loader(100)).losses)
    assert steps == list(range(4, 101, 4))


def test_times_add_up_to_the_epochs(tmp_path: Path) -> None:
    logger = fit(Model(), logger=Folder(tmp_path))
    record, epoch = read_record(tmp_path), logger.last
    assert epoch is not None
    (some,) = record.steps
    assert (some.first, some.last, some.timed, some.samples) == (1, 8, 7, 7 * BATCH_SIZE)  # one was slowed by counting
    assert sum(some.cycle_ms) / 1e3 == pytest.approx(epoch.train_seconds, rel=1e-3)
    assert sum(some.wait_ms) / sum(some.cycle_ms) == pytest.approx(epoch.data_wait_frac, rel=1e-2)


def test_epochs_are_what_is_logged(tmp_path: Path) -> None:
    logger = fit(Model(), logger=Folder(tmp_path), max_epochs=2)
    record = read_record(tmp_path)
    assert [epoch["step_ms_p50"] for epoch in record.epochs] == [epoch.step_ms_p50 for epoch in logger.history]
    assert record.peak_memory_mib == max(epoch.peak_memory_mib for epoch in logger.history)


def test_with_the_plugin_its_settings_and_its_report_are_in_it(tmp_path: Path) -> None:
    plugin = AccelPlugin(compile="off")
    record = recorded(tmp_path, plugins=[plugin])
    assert record.header.settings == plugin.plan.to_dict()
    assert record.report is not None
    assert record.report["techniques"].keys() == plugin.report.techniques.keys()


def test_a_run_without_a_logger_writes_nothing(tmp_path: Path) -> None:
    fit(Model(), default_root_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Elsewhere(Logger):
    """A logger with a folder that is none of this run, here."""

    def __init__(self, log_dir: Any) -> None:
        super().__init__()
        self._log_dir = log_dir

    @property
    def log_dir(self) -> Any:
        if isinstance(self._log_dir, Exception):
            raise self._log_dir
        return self._log_dir

    name = version = "0"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    "log_dir",
    [None, "s3://bucket/run", RuntimeError("offline"), object()],
    ids=["none", "remote", "raises", "no path"],
)
def test_loggers_without_a_folder_here_are_passed_over(log_dir: Any, tmp_path: Path) -> None:
    assert fit(Model(), logger=Elsewhere(log_dir), default_root_dir=tmp_path).last is not None
    assert list(tmp_path.iterdir()) == []


def test_a_rehearsal_writes_nothing(tmp_path: Path) -> None:
    fit(Model(), logger=Folder(tmp_path), fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_raises_has_its_steps_until_then_and_the_error(tmp_path: Path) -> None:
    def raises(module: Model, batch_idx: int) -> None:
        if batch_idx == 5:
            raise ValueError("a bad sample")

    with pytest.raises(ValueError, match="a bad sample"):
        recorded(tmp_path, Model(raises))
    record = read_record(tmp_path)
    assert (record.num_steps, record.status) == (5, "ValueError: a bad sample")


def test_losses_that_are_no_numbers_come_back(tmp_path: Path) -> None:
    def spoils(module: Model, batch_idx: int) -> None:
        with torch.no_grad():
            module.layer.bias.fill_(math.inf)

    record = recorded(tmp_path, Model(spoils))
    assert set(record.losses.values()) == {math.inf}


def test_a_second_fit_has_a_record_of_its_own_and_the_latest_is_read(tmp_path: Path) -> None:
    recorded(tmp_path)
    assert recorded(tmp_path, max_epochs=3).num_steps == 24


def test_a_run_that_resumes_goes_on_counting(tmp_path: Path) -> None:
    first = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1
    )
    first.fit(Model(), loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed = recorded(tmp_path, max_epochs=2, fit_options={"ckpt_path": str(tmp_path / "first.ckpt")})
    assert (resumed.steps[0].first, resumed.num_steps, min(resumed.losses)) == (9, 8, 9)


def test_a_folder_that_cannot_be_written_costs_the_record_and_not_the_run(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    Path(logger.log_dir).mkdir(parents=True)
    Path(logger.log_dir, "accel").write_text("in the way")
    plugin = AccelPlugin()
    assert fit(Model(), logger=logger, plugins=[plugin]).last is not None
    (note,) = [note for note in plugin.report.notes if "record" in note]
    assert "could not be written" in note


def test_wherever_a_killed_process_left_off_what_was_whole_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, SOME, SOME)
    text = path.read_text()
    lines = text.splitlines()
    for end in range(len(lines[0]), len(text)):
        path.write_text(text[:end])
        whole = [line for line in text[:end].splitlines() if line in lines[1:]]
        record = read_record(tmp_path)
        assert (len(record.steps), record.status) == (len(whole), "")


def test_of_thousands_of_epochs_ever_fewer_are_written(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run.jsonl", HEADER)
    for number in range(5000):
        writer.write(EpochEnded(epoch=number))
    assert len(read_record(tmp_path / "run.jsonl").epochs) == 1000 + 500 + 500 + 125


def test_pieces_are_means_of_neighbours() -> None:
    assert in_pieces([1.0, 3.0, 5.0, 7.0, 9.0], most=2) == [3.0, 8.0]
    assert [len(in_pieces([1.0] * count, most=32)) for count in (33, 63, 64, 65, 1000)] == [17, 32, 32, 22, 32]
    assert in_pieces([1.0, 2.0], most=32) == [1.0, 2.0]
    assert in_pieces([], most=32) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty: the run ended before"),
        (json.dumps({"loss": 1.0}) + "\n", "does not begin as the record of a run"),
        (json.dumps({"kind": "run", "format": 9}) + "\n", r"format 9, of another version .* reads format 1"),
        (json.dumps({"kind": "run", "format": 1}) + "\n", "is damaged: TypeError: .* missing"),
        ("no JSON\nat all\n", "is damaged in line 1"),
        ("no JSON", "is damaged in line 1"),
        ("[1]\n", "is damaged in line 1: it is no object"),
    ],
    ids=["empty", "another file", "another version", "incomplete", "no JSON", "no line", "no object"],
)
def test_what_is_no_record_is_said(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    with pytest.raises(RecordError, match=complaint):
        read_record(tmp_path / "run.jsonl")


def test_a_folder_without_a_record_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds no run .* train with AccelPlugin\(\) or SpeedMemoryLogger\(\)"):
        read_record(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="nowhere does not exist"):
        read_record(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "damage",
    [
        {"cycle_ms": ["a", 1.0]},
        {"cycle_ms": [0.0, 1.0]},
        {"cycle_ms": [-1.0, 1.0]},
        {"cycle_ms": ["nan", 1.0]},
        {"cycle_ms": [1.0]},
        {"parts_ms": {"forward": 1.0}},
        {"parts_ms": [1.0]},
        {"first": None},
        {"timed": "x"},
        {"samples": "4"},
    ],
    ids=str,
)
def test_lines_that_are_no_measurement_are_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = written(tmp_path, SOME)
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | damage)}\n")
    with pytest.raises(RecordError, match="is damaged"):
        read_record(tmp_path)


def test_a_fit_that_ended_before_its_first_step_does_not_hide_the_one_before(tmp_path: Path) -> None:
    whole = written(tmp_path, SOME)
    stub = RecordWriter(whole.with_name("20261124-2.jsonl"), HEADER).path
    record = read_record(tmp_path)
    assert (record.path, record.passed_over) == (whole, [stub])


def test_fits_in_one_moment_have_a_record_each(tmp_path: Path) -> None:
    for _ in range(3):
        recorded(tmp_path, data=loader(2))
    assert len(list(tmp_path.glob("**/accel/*.jsonl"))) == 3


class Returns(Model):
    """By hand, and returns what it is told to."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("running", torch.zeros(()))
        self.what = what

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.running.fill_(batch_idx)
        return {"loss": self.what(self)}


@pytest.mark.parametrize(
    "loss", [torch.zeros((), dtype=torch.complex64), torch.zeros((), device="meta")], ids=["complex", "meta"]
)
def test_losses_that_are_no_real_numbers_are_left_out(tmp_path: Path, loss: torch.Tensor) -> None:
    record = recorded(tmp_path, Returns(lambda module: loss))
    assert (record.losses, record.status) == ({}, "finished")


def test_a_loss_that_is_written_to_later_is_kept_as_it_was(tmp_path: Path) -> None:
    losses = recorded(tmp_path, Returns(lambda module: module.running)).losses
    assert losses == {step: step - 1 for step in range(1, 9)}


class Eight(Model):
    """Each of its losses is 8."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return 0 * self.layer(batch).sum() + 8


def test_accumulating_gradients_leaves_losses_what_they_are(tmp_path: Path) -> None:
    record = recorded(tmp_path, Eight(), accumulate_grad_batches=4)
    assert set(record.losses.values()) == {8.0}
    assert record.header.accumulate_grad_batches == 4


def test_a_schedule_of_accumulation_leaves_losses_what_they_are(tmp_path: Path) -> None:
    schedule = GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})
    record = recorded(tmp_path, Eight(), callbacks=[schedule], max_epochs=3)
    assert (len(record.losses), set(record.losses.values())) == (24, {8.0})


def test_secrets_on_the_command_line_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--api-key", "SECRET", "--token=SECRET", "--lr", "0.1"])
    assert recorded(tmp_path).header.command == ["train.py", "--api-key", "…", "--token=…", "--lr", "0.1"]


def test_an_error_after_the_last_step_is_its_end(tmp_path: Path) -> None:
    class Late(Model):
        def on_train_end(self) -> None:
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        recorded(tmp_path, Late())
    assert read_record(tmp_path).status == "ValueError: late"


def test_of_short_epochs_not_every_one_is_a_line(tmp_path: Path) -> None:
    record = recorded(tmp_path, data=loader(2), max_epochs=20)
    assert (len(record.steps), record.num_steps, len(record.epochs)) == (2, 40, 20)


def test_a_folder_that_the_environment_names_is_written_to_with_any_logger_or_none(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LIGHTNING_ACCEL_RECORD", str(tmp_path / "asked"))
        fit(Model())
        assert read_record(tmp_path / "asked").num_steps == 8
        fit(Model(), logger=CSVLogger(tmp_path / "logs"), max_epochs=2)
        assert read_record(tmp_path / "asked").num_steps == 16
    assert not list(tmp_path.glob("logs/**/*.jsonl"))


def test_it_says_where_code_comes_from_that_is_not_installed(tmp_path: Path) -> None:
    folders = [Path(folder) for folder in recorded(tmp_path).header.source_folders]
    assert any(Path(__file__).resolve().is_relative_to(folder) for folder in folders)
    installed = [Path(torch.__file__).resolve(), Path(json.__file__).resolve()]
    assert not any(file.is_relative_to(folder) for file in installed for folder in folders)
    assert not any(one != other and one.is_relative_to(other) for one in folders for other in folders)


@pytest.mark.parametrize(("steps", "watched"), [(8, 3), (120, 101)], ids=["a short run", "a longer one"])
def test_one_step_is_taken_apart(tmp_path: Path, steps: int, watched: int) -> None:
    record = recorded(tmp_path, data=loader(steps))
    anatomy, memory = record.anatomy, record.memory
    assert anatomy is not None
    assert memory is not None
    assert anatomy.step == memory.step == watched
    assert {"layer", ""} <= {one.module for one in anatomy.modules}
    assert memory.peak_bytes == sum(memory.parts.values()) > 0


def test_memory_that_is_held_is_followed(tmp_path: Path) -> None:
    (some,) = recorded(tmp_path, data=loader(64)).steps
    assert len(some.held_mib) == 64 // 16
    assert min(some.held_mib) > 50  # of a process with torch in it


def test_graphs_that_are_captured_are_counted(tmp_path: Path) -> None:
    class Compiles(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            torch.compile(lambda x: x + batch_idx, backend="eager")(batch)
            return self.layer(batch).sum()

    (some,) = recorded(tmp_path, Compiles()).steps
    assert some.captured >= 2  # for the first number, and for any other
    assert some.capturing == some.captured  # a graph a step
    assert 0 < some.capturing_ms < sum(piece.ms * piece.steps for piece in some.pieces())


def test_loading_samples_is_told_apart_from_waiting_for_their_batch(tmp_path: Path) -> None:
    def recorded_steps(workers: int) -> StepMeasured:
        return recorded(
            tmp_path / str(workers),
            data=loader(32, num_workers=workers, multiprocessing_context="fork" if workers else None),
        ).steps[0]

    some = recorded_steps(0)
    assert 0 < some.samples_ms < some.parts_ms[DATA]
    assert recorded_steps(1).samples_ms == 0  # in another process
