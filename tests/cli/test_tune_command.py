"""The subcommand ``tune``: its options, and the configuration that it writes and ``fit`` reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("jsonargparse")

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

from lightning_accel import AccelCLI, Plan
from lightning_accel.cli.tune_command import TuneOptions, check_out, places_in, with_sections
from support.search_runs import Samples, Sleeper

CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False},
    "model": {"class_path": "support.search_runs.Sleeper", "init_args": {"step_s": 0.05}},
    "data": {"class_path": "support.search_runs.Samples", "init_args": {"batch_size": 16}},
    "accel": {"compile": "off", "techniques": {"threads": 1}, "trust": "checked"},
    "tuning": {"objective": "speed"},
}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str, **options: Any) -> AccelCLI:
    Path("config.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    return AccelCLI(save_config_callback=None, **options)


@pytest.mark.slow
def test_what_tune_writes_is_what_fit_then_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, "tune", "--config", "config.yaml", "--time", "40s", "--out", "found.yaml")
    assert yaml.safe_load(Path("found.yaml").read_text()) == {"data": {"init_args": {"batch_size": 32}}}
    assert "fit --config ... --config found.yaml" in capsys.readouterr().out
    assert not Path("lightning_logs").exists()

    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    run = command(monkeypatch, "fit", "--config", "config.yaml", "--config", "found.yaml", *quiet)
    assert isinstance(run.datamodule, Samples)
    assert run.datamodule.batch_size == 32
    assert isinstance(run.model, Sleeper)
    assert run.trainer.global_step == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--objective", "fast"], "tuning.objective"),
        (["--time", "soon"], "time='soon' is not possible"),
        (["--memory-limit", "much"], "memory_limit='much' is no amount of memory"),
        (["--out", "nowhere/accel.yaml"], "out='nowhere/accel.yaml' cannot be written"),
    ],
)
def test_a_bad_option_ends_the_command_and_nothing_is_written(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        command(monkeypatch, "tune", "--config", "config.yaml", *arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path("accel.yaml").exists()


def test_short_options_are_those_of_the_section() -> None:
    given = ["train.py", "tune", "--time", "3min", "--memory-limit=2GiB", "--data.batch_size", "4"]
    section = ["--tuning.time", "3min", "--tuning.memory_limit=2GiB", "--data.batch_size", "4"]
    assert with_sections(given) == ["train.py", "tune", *section]
    assert all(f"--{name.replace('_', '-')}" != f"--tuning.{name}" for name in vars(TuneOptions()))


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"data": {"batch_size": 4}}, ("data", "batch_size")),
        ({"data": {"class_path": "x.Y", "init_args": {"batch_size": 4}}}, ("data", "init_args", "batch_size")),
        ({"model": {"batch_size": 4}, "data": None}, ("model", "batch_size")),
        ({"model": {"batch_size": 4}, "data": {"batch_size": 4}}, ("data", "batch_size")),
    ],
)
def test_what_is_found_is_put_where_the_configuration_has_it(config: dict[str, Any], path: tuple[str, ...]) -> None:
    assert places_in(config)["batch_size"][-1] == path


def test_a_configuration_without_a_place_for_it_has_none() -> None:
    assert places_in({"data": {"class_path": "x.Y"}, "model": {"width": 3}}) == {}


def test_the_folder_of_the_file_has_to_be_there() -> None:
    assert check_out("accel.yaml") == Path("accel.yaml")
    Path("folder").mkdir()
    with pytest.raises(ValueError, match=r"cannot be written. Allowed: a file in a folder that is there"):
        check_out("folder")


def test_the_section_is_read_by_every_subcommand_and_changes_none_but_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    run = command(monkeypatch, "--config", "config.yaml", run=False)
    assert run.plan == Plan(compile="off", techniques={"threads": 1}, trust="checked")


def test_a_trainer_of_ones_own_keeps_the_subcommands_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Trainer):
        pass

    with pytest.raises(SystemExit):
        command(monkeypatch, "tune", "--config", "config.yaml", trainer_class=Own)
    assert "tune" not in LightningCLI.subcommands()
