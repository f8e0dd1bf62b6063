"""The `lightning-accel plan` command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_accel.__main__ import main

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
SEVEN_BILLION = ["plan", "--params", "7e9", "--gpus", "8"]


def printed_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def row(printed: str, title: str) -> list[str]:
    """The cells of a row of the table, one for each strategy."""
    line = next(line for line in printed.splitlines() if line.startswith(f"│ {title}"))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_prints_the_terms_by_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    """7e9 parameters of 4 bytes are 26.1 GiB."""
    printed = printed_by(capsys, "--params", "7e9", "--gpus", "8")
    assert row(printed, "parameters") == ["26.1", "26.1", "3.3"]
    assert row(printed, "gradients") == ["26.1", "26.1", "3.3"]
    assert row(printed, "optimizer states (adamw)") == ["52.2", "52.2", "6.5"]
    assert row(printed, "peak") == ["130.4", "130.4", "16.3"]


def test_says_what_fits_and_the_trainer_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(capsys, "--params", "7e9", "--gpus", "8", "--memory", "80GiB")
    assert row(printed, "fits into 90% of 80.0") == ["no", "no", "yes"]
    assert 'Trainer(strategy="accel_fsdp", devices=8, plugins=[AccelPlugin(precision="bf16-mixed")])' in printed
    assert "accel_fsdp fits from 2 such devices on." in printed


def test_ddp_comes_before_fsdp_where_both_fit(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(capsys, "--params", "350M", "--gpus", "4", "--memory", "24GiB")
    assert row(printed, "fits into") == ["yes", "yes", "yes"]
    assert 'Trainer(strategy="accel_ddp", devices=4, ' in printed
    assert "accel_fsdp fits" not in printed


def test_one_device_has_one_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(capsys, "--params", "350M", "--gpus", "1", "--memory", "24GiB")
    assert "accel_ddp" not in printed
    assert 'Trainer(strategy="accel", devices=1, ' in printed


def test_says_how_many_devices_it_takes_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(capsys, "--params", "70B", "--gpus", "8", "--memory", "80GiB")
    assert row(printed, "fits into") == ["no", "no", "no"]
    assert "Trainer(" not in printed
    least = re.search(r"accel_fsdp fits from (\d+) such devices on", printed)
    assert least is not None
    enough = printed_by(capsys, "--params", "70B", "--gpus", least[1], "--memory", "80GiB")
    assert row(enough, "fits into")[-1] == "yes"


@pytest.mark.parametrize(
    ("memory", "arguments", "helps"),
    [
        ("16GiB", ["--seq-len", "65536"], "shorter sequences, --checkpointing full, devices with more memory"),
        (
            "1GiB",
            ["--seq-len", "65536", "--batch-size", "2", "--checkpointing", "full"],
            "a smaller batch, devices with more memory",
        ),
        ("1GiB", [], "devices with more memory"),
    ],
)
def test_says_what_helps_where_no_number_of_devices_is_enough(
    capsys: pytest.CaptureFixture[str], memory: str, arguments: list[str], helps: str
) -> None:
    printed = printed_by(capsys, "--params", "7B", "--gpus", "8", "--memory", memory, *arguments)
    assert f"No number of such devices is enough. What helps: {helps}." in printed


def test_machines_of_eight_are_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(capsys, "--params", "70B", "--gpus", "64")
    assert 'Trainer(strategy="accel_fsdp", devices=8, num_nodes=8, ' in printed


def test_checkpointing_is_in_the_trainer_and_lowers_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--params", "7e9", "--gpus", "8", "--seq-len", "4096", "--batch-size", "2", "--vocab", "32000"]
    kept = printed_by(capsys, *shape)
    recomputed = printed_by(capsys, *shape, "--checkpointing", "full")
    assert 'memory={"checkpoint": "full"}' in recomputed
    assert float(row(recomputed, "peak")[-1]) < float(row(kept, "peak")[-1])


def test_small_models_are_in_mebibytes(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(capsys, "--params", "1M", "--gpus", "2")
    assert "per device, MiB" in printed
    assert row(printed, "parameters") == ["3.8", "3.8", "1.9"]


def test_says_what_was_guessed_and_what_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    guessed = printed_by(capsys, "--params", "6.7B", "--gpus", "8")
    assert "6,700,000,000 parameters in 32 layers of width 4,177 (layers and width guessed)" in guessed
    assert "Activations are not counted: give --seq-len" in guessed
    shape = ["--layers", "32", "--width", "4096", "--vocab", "50257"]
    given = printed_by(capsys, "--params", "6.7B", "--gpus", "8", *shape, "--seq-len", "2048")
    assert "guessed" not in given
    assert "not counted" not in given


@pytest.mark.parametrize("text", ["7e9", "7B", "7b", "7000M", "7_000_000_000", "7,000,000,000", "0.007T"])
def test_parameters_may_be_written_as_people_do(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert "7,000,000,000 parameters" in printed_by(capsys, "--params", text, "--gpus", "8")


@pytest.mark.parametrize(
    "option", ["--params", "--gpus", "--layers", "--width", "--vocab", "--seq-len", "--batch-size"]
)
@pytest.mark.parametrize("value", ["0", "-3", "-7B", "-7e9", "1.5", "many", "nan", "inf", "1e999", ""])
def test_what_is_no_positive_whole_number_is_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*SEVEN_BILLION, option, value])
    assert stopped.value.code == 2
    assert f"argument {option}: {value!r} is not possible. Allowed: whole numbers from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--optimizer", "adan"], "argument --optimizer: invalid choice: 'adan'"),
        (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["--memory", "80"], "memory='80': 80 what? '80GiB'"),
        (["--memory", "-3GiB"], "memory='-3GiB' is not positive"),
        (["--memory", "lots"], "memory='lots' is no amount of memory"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*SEVEN_BILLION, *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-size", "8"], "--batch-size 8 needs --seq-len"),
        (["--tied-embeddings"], "--tied-embeddings needs --vocab"),
        (["--vocab", "2M", "--width", "4096"], "params=7,000,000,000 leaves nothing for the blocks"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main([*SEVEN_BILLION, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_answers_without_torch() -> None:
    code = """
import sys
from lightning_accel.__main__ import main
main(["plan", "--params", "7e9", "--gpus", "8", "--memory", "80GiB"])
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "accel_fsdp" in done.stdout
    assert done.stdout.split()[-1] == "False"


@pytest.mark.parametrize(
    ("command", "output"), re.findall(r"```console\nlightning-accel (.*?)\n```\n+```text\n(.*?)```", PAGE, re.S)
)
def test_the_page_shows_what_it_prints(capsys: pytest.CaptureFixture[str], command: str, output: str) -> None:
    assert main(command.split()) == 0
    assert capsys.readouterr().out == output
