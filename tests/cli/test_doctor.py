"""The `lightning-accel doctor` command."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_accel.__main__ import main
from lightning_accel.cli import doctor
from lightning_accel.core.host import Host

H200 = Host(kind="cuda", device_name="NVIDIA H200", capability=(9, 0), native_bf16=True, compiler="triton")
OLD_CPU = Host(kind="cpu", device_name="Some old CPU")
TPU = Host(kind="xla", device_name="TPU v5", native_bf16=True)
APPLE = Host(kind="mps", device_name="Apple M3")


def extras_of(diagnosis: doctor.Diagnosis) -> dict[str, doctor.Extra]:
    return {extra.name: extra for extra in diagnosis.extras}


def test_says_what_this_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    host = Host.detect()
    assert host.device_name in printed
    assert importlib.metadata.version("torch") in printed
    assert "precision='auto'" in printed
    for extra in importlib.metadata.metadata("lightning-accel").get_all("Provides-Extra") or []:
        assert extra in printed


def test_precision_is_what_a_run_here_would_take() -> None:
    assert doctor.examine(H200).precision[0] == "bf16-mixed"
    precision, reason = doctor.examine(OLD_CPU).precision
    assert precision == "32-true"
    assert "AVX512-BF16" in reason


def test_names_the_exact_command_for_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    extras = extras_of(doctor.examine())
    missing = [extra for extra in extras.values() if extra.state == "missing"]
    for extra in missing:
        assert extra.wanting
        assert extra.install == f"pip install 'lightning-accel[{extra.name}]'"
    doctor.show(doctor.examine())
    printed = capsys.readouterr().out
    for extra in extras.values():
        assert (extra.install in printed) == (extra.state == "missing")


def test_an_installed_extra_is_ready() -> None:
    extra = extras_of(doctor.examine())["tensorboard"]
    assert extra.state == "ready"
    assert extra.found == (f"tensorboard {importlib.metadata.version('tensorboard')}",)


def test_a_version_too_old_is_wanting(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0" if name == "tensorboard" else found(name))
    extra = extras_of(doctor.examine())["tensorboard"]
    assert extra.state == "missing"
    assert extra.wanting == ("tensorboard>=2.15 (has 1.0)",)


def test_an_extra_of_an_extra_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``jsonargparse`` alone is not enough for LightningCLI: it takes ``jsonargparse[signatures]``."""
    found = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "docstring-parser" else found(name))
    assert extras_of(doctor.examine())["cli"].wanting == ("docstring-parser",)


def test_nvidia_extras_are_for_nvidia_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert extras_of(doctor.examine(OLD_CPU))["flash"].state == "not for this machine"
    monkeypatch.setattr("torch.version.cuda", "13.0")
    extras = extras_of(doctor.examine(H200))
    assert extras["flash"].state == extras["cuda13"].state == "missing"
    assert extras["cuda12"].state == "not for this machine"


def test_advises_on_a_missing_compiler() -> None:
    (line,) = doctor.examine(OLD_CPU).advice
    assert line.startswith("compile: ")
    assert "apt-get install g++" in line


@pytest.mark.medium
def test_says_what_a_run_goes_without_and_what_else_there_is() -> None:
    assert doctor.examine(H200).advice == ()
    for name in ("flash_attention", "inplace_activations", "memory_format", "compile"):
        assert any(line.startswith(name) for line in doctor.examine(TPU).advice)
    (compile_line,) = (line for line in doctor.examine(APPLE).advice if line.startswith("compile"))
    assert "module.compile()" in compile_line


def test_says_which_plugin_a_trainer_takes_on_a_tpu() -> None:
    assert any("give them an AccelXLAPlugin" in line for line in doctor.examine(TPU).advice)


def test_claims_nothing_of_a_device_that_cannot_be_asked() -> None:
    assert doctor.examine(APPLE).facts["bfloat16"] == "not known"
    assert doctor.examine(OLD_CPU).facts["bfloat16"] == "not fast"


def test_an_amd_card_is_described_by_its_architecture() -> None:
    facts = doctor.examine(Host(kind="rocm", device_name="MI300X", arch="gfx942", compiler="triton")).facts
    assert facts["architecture"] == "gfx942"
    assert "compute capability" not in facts


def test_runs_from_a_checkout_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_metadata(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", no_metadata)
    doctor.show(doctor.examine(H200))
    assert "pip install -e ." in capsys.readouterr().out


@pytest.mark.medium
def test_answers_without_lightning() -> None:
    code = "import sys; from lightning_accel.__main__ import main; main(['doctor']); print('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.partition("LOADED")[2].split()
    assert "torch" in loaded
    assert not {"lightning", "lightning.pytorch", "pytorch_lightning", "jsonargparse"} & set(loaded)


def test_help_answers_before_torch_has_loaded() -> None:
    code = """
import sys
from pathlib import Path
from lightning_accel.__main__ import main
try:
    main(["--help"])
except SystemExit:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
    assert done.stdout.split()[-1] == "False"


def test_an_unknown_subcommand_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["docter"])
    assert "doctor" in capsys.readouterr().err


def test_every_extra_says_what_it_is_for() -> None:
    assert all(extra.purpose for extra in doctor.examine().extras)


def test_every_extra_that_the_sources_tell_users_to_install_is_there() -> None:
    root = Path(__file__).parents[2]
    sources = [path.read_text(encoding="utf-8") for path in (root / "lightning_accel").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"lightning-accel\[(\w+)\]", text)}
    assert {"cli", "deploy"} <= named <= {*extras_of(doctor.examine()), "name"}
