"""What does not go together under XLA says so, with what to use: ``make test-xla``."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla", reason="needs torch_xla, in an environment of its own: make test-xla")

from lightning_accel import AccelError, AccelPlugin, AccelWarning, AccelXLAPlugin
from support.xla_runs import fit, rows, trainer


def test_accel_plugin_with_an_xla_strategy_names_the_other_one() -> None:
    with pytest.raises(TypeError, match=r"only work with the `XLAPrecision`.*there is lightning_accel.AccelXLAPlugin"):
        trainer(AccelPlugin())


def test_accel_xla_plugin_elsewhere_names_the_other_one() -> None:
    with pytest.raises(ValueError, match=r"AccelXLAPlugin with SingleDeviceStrategy on cpu: .* use AccelPlugin"):
        fit(AccelXLAPlugin(), loader=rows(1), accelerator="cpu")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"out_of_memory": "split"}, "out_of_memory: XLA runs a step once it is recorded"),
        ({"compile": "on"}, "compile: XLA compiles every step itself"),
        ({"optimizer": "fused"}, "optimizer: torch has no fused steps for XLA: optimizer='auto'"),
        ({"threads": 1}, "threads: XLA computes with threads of its own"),
    ],
)
def test_what_cannot_be_had_is_a_warning_and_with_strict_an_error(settings: dict[str, object], said: str) -> None:
    with pytest.warns(AccelWarning, match=said):
        fit(AccelXLAPlugin(**settings), loader=rows(1))
    with pytest.raises(AccelError, match=said):
        fit(AccelXLAPlugin(**settings, strict=True), loader=rows(1))


def test_other_processes_and_copies_get_the_settings_and_no_run() -> None:
    plugin = AccelXLAPlugin(padding=16)
    fit(plugin, loader=rows(1))
    assert repr(pickle.loads(pickle.dumps(plugin))) == repr(plugin) == "AccelXLAPlugin(precision='auto', padding=16)"


def test_what_is_not_done_by_default_is_in_the_report() -> None:
    plugin = AccelXLAPlugin()
    fit(plugin, loader=rows(1))
    assert [note.partition(":")[0] for note in plugin.report.notes] == ["tune", "out_of_memory"]
    assert "XLA's CPU device writes them, and cannot read them again" in plugin.report.of("xla").status


def test_programs_are_written_where_the_device_can_read_them(tmp_path: Path) -> None:
    """In a process that says it has a TPU's runtime, as PJRT's CPU device writes programs, too."""
    code = f"""
import torch, torch_xla.runtime as runtime
from pathlib import Path
from lightning_accel.core import xla
runtime.device_type = lambda: "TPU"
print(xla.keep_programs(Path({str(tmp_path)!r})))
(torch.ones(3).to("xla") + 1).cpu()
print(xla.programs_compiled())
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
    )
    assert f"compiled programs are kept in {tmp_path}/process-0" in ran.stdout
    assert list((tmp_path / "process-0").iterdir())
