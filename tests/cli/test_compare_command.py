"""``lightning-accel compare``, of runs that have trained."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_accel.__main__ import main
from support.measured_runs import Folder, Model, fit, loader, no_hook


class Other(Model):
    """Another class."""


def sleeps(ms: float) -> Callable[[Any, int], None]:
    return lambda module, batch_idx: time.sleep(ms / 1e3)


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., str]:
    def trained(name: str, hook: Any = no_hook, kind: type[Model] = Model, steps: int = 30) -> str:
        fit(kind(hook), loader(steps), logger=Folder(tmp_path / name))
        return str(tmp_path / name)

    return trained


@pytest.mark.medium
def test_two_runs_are_shown_beside_each_other(runs: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", runs("a", sleeps(20)), runs("b", sleeps(5))]) == 0
    shown = capsys.readouterr().out
    assert all(row in shown for row in ("samples/s", "peak memory, MiB", "loss, to step 30", "30 steps"))


def test_a_gate_lets_a_faster_run_pass_and_stops_a_slower_one(runs: Callable[..., str]) -> None:
    slow, fast = runs("slow", sleeps(20)), runs("fast", sleeps(2))
    assert main(["compare", slow, fast, "--gate", "3%"]) == 0
    assert main(["compare", fast, slow, "--gate", "3%"]) == 1


def test_json_is_all_there_is_on_the_standard_output(
    runs: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["compare", runs("a", sleeps(2)), runs("b", sleeps(20)), "--gate", "0.1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (status, found["worse"]) == (1, ["speed"])
    assert found["speed"]["ratio"] < 0.5


def test_runs_of_different_models_have_a_status_of_their_own(
    runs: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", runs("a"), runs("b", kind=Other)]) == 2
    assert "The model is not the same" in capsys.readouterr().err


def test_a_folder_without_a_run_has_that_status_too(
    runs: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", runs("a"), str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_gate_on_too_few_steps_decides_nothing(runs: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", runs("a", steps=5), runs("b", steps=5), "--gate", "3%"]) == 2
    assert "A gate needs more steps" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["three", "150%", "-1%"])
def test_a_gate_that_is_no_share_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "a", "b", f"--gate={share}"])
    assert f"{share!r} is no share: write one between 0% and 100%" in capsys.readouterr().err
