"""What all commands have in common: help, and how they end that cannot go on."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest

from lightning_accel.__main__ import main
from lightning_accel.cli.command import add_options, ended

COMMANDS = ("doctor", "plan", "claims", "cache", "compare", "report", "export", "deploy")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_what_the_command_is_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    usage, description, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: lightning-accel {command}")
    assert len(description.split()) > 8


def test_parameters_are_options_and_the_docstring_is_their_help() -> None:
    def train(
        run: Path,
        *,
        rate: Annotated[float, {"type": lambda text: float(text) / 100, "metavar": "3%"}],
        kind: Literal["a", "b"] = "a",
        seeds: list[int] | None = None,
        dry_run: bool = False,
    ) -> int:
        """Trains.

        In one go.

        Args:
            run: a folder, which goes on
                in a second line
            rate: in 100%
            kind: which
            seeds: may be repeated
            dry_run: writes nothing
        """
        return 0

    parser = argparse.ArgumentParser()
    add_options(parser, train)
    given = parser.parse_args(["x", "--rate", "3", "--seeds", "1", "--seeds", "2", "--dry-run"])
    assert vars(given) == {"run": Path("x"), "rate": 0.03, "kind": "a", "seeds": [1, 2], "dry_run": True}
    shown = " ".join(parser.format_help().split())
    for text in (
        "Trains. In one go.",
        "RUN a folder, which goes on in a second line",
        "--rate 3% in 100%",
        "{a,b} which",
    ):
        assert text in shown
    with pytest.raises(SystemExit):
        parser.parse_args(["x"])  # without a rate


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "/etc/report.html"), ValueError("no run")])
def test_what_a_user_can_mend_is_said_in_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    assert ended("report", fail) == 2
    assert capsys.readouterr().err == f"lightning-accel report: {error}\n"


def test_an_error_of_our_own_is_shown_whole() -> None:
    with pytest.raises(ZeroDivisionError):
        ended("report", lambda: 1 // 0)


def test_a_second_interrupt_ends_what_is_still_winding_up() -> None:
    """As Inductor's workers do at the end of a process, which wait for each other."""
    code = """
import atexit, os, signal, threading, time
from lightning_accel.cli.command import ended
def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
def wind_up():
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60)
atexit.register(wind_up)
raise SystemExit(ended("claims", interrupted))
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler){code}"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stderr == "lightning-accel claims: stopped; nothing was left behind.\n"
    assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize("content", ["trainer:\n  max_epochs: 3\n", "model:\n  hidden: 8\n", ""])
def test_tune_without_the_class_of_a_model_says_how_to_start_it(
    content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("config.yaml").write_text(content)
    assert main(["tune", "--config", "config.yaml"]) == 2
    assert "run: python train.py tune" in capsys.readouterr().err
