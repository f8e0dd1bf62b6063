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
from lightning_accel.settings import Plan
from support.xla_runs import fit, rows, trainer


def test_accel_plugin_with_an_xla_strategy_names_the_other_one() -> None:
    with pytest.raises(TypeError, match=r"only work with the `XLAPrecision`.*use lightning_accel.AccelXLAPlugin"):
        trainer(AccelPlugin())


def test_accel_xla_plugin_elsewhere_names_the_other_one() -> None:
    with pytest.raises(ValueError, match=r"AccelXLAPlugin with SingleDeviceStrategy on cpu: .* use AccelPlugin"):
        fit(AccelXLAPlugin(), loader=rows(1), accelerator="cpu")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"memory": {"on_oom": "split"}}, r"memory\.on_oom: XLA runs a step once it is recorded"),
        ({"compile": "on"}, "compile: XLA compiles every step itself"),
        ({"optimizer": "fused"}, "optimizer: torch has no fused steps for XLA: techniques.optimizer='auto'"),
        ({"threads": 1}, "threads: XLA computes with threads of its own"),
    ],
)
def test_what_cannot_be_had_is_a_warning_and_with_strict_an_error(settings: dict[str, object], said: str) -> None:
    with pytest.warns(AccelWarning, match=said):
        fit(AccelXLAPlugin.from_plan(Plan().replace(**settings)), loader=rows(1))
    with pytest.raises(AccelError, match=said):
        fit(AccelXLAPlugin.from_plan(Plan().replace(**settings, strict=True)), loader=rows(1))


def test_other_processes_and_copies_get_the_settings_and_no_run() -> None:
    plugin = AccelXLAPlugin(loader={"padding": 16})
    fit(plugin, loader=rows(1))
    assert (
        repr(pickle.loads(pickle.dumps(plugin)))
        == repr(plugin)
        == "AccelXLAPlugin(precision='auto', loader=LoaderOptions(padding=16))"
    )


def test_what_is_not_done_by_default_is_in_the_report() -> None:
    plugin = AccelXLAPlugin()
    fit(plugin, loader=rows(1))
    assert [note.partition(":")[0] for note in plugin.report.notes] == ["trust", "memory.on_oom"]
    assert "XLA's CPU device writes them, and cannot read them again" in plugin.report.of("xla").status


def test_a_second_process_finds_the_programs_of_the_first_which_the_cpu_device_cannot_read(tmp_path: Path) -> None:
    """In processes that say they have a TPU's runtime, as PJRT's CPU device writes programs, too.

    Where it can read them, one day, the second process has a hit and compiles nothing: this test then fails.
    """
    code = f"""
import torch, torch_xla.debug.metrics as metrics, torch_xla.runtime as runtime
from pathlib import Path
from lightning_accel.core import xla
runtime.device_type = lambda: "TPU"
print(xla.keep_programs(Path({str(tmp_path)!r})))
(torch.ones(3).to("xla") + 1).cpu()
counters = {{name: metrics.counter_value(name) for name in metrics.counter_names() if "PersistentCache" in name}}
print(counters)
print("compiled", xla.programs_compiled())
"""
    said, written = [], []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PJRT_DEVICE": "CPU"},
        )
        said.append(ran.stdout.splitlines())
        written.append({path.name for path in (tmp_path / "process-0").iterdir()})
    place = f"compiled programs are kept in {tmp_path}/process-0"
    assert said[0] == [place, "{'PersistentCacheMiss': 1}", "compiled 1"]
    assert said[1] == [place, "{'PersistentCacheDeserializeFailure': 1}", "compiled 1"]
    assert written[0] == written[1] != set()
