"""What torch_xla is asked, by one that is simulated; the real one is in tests/xla/."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_accel.core import xla


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def simulate(initialize: Callable[..., Any], device: str = "TPU") -> None:
        runtime = ModuleType("torch_xla.runtime")
        vars(runtime).update(device_type=lambda: device, global_ordinal=lambda: 3, initialize_cache=initialize)
        monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
        monkeypatch.delenv(xla.CACHE_VARIABLE, raising=False)

    return simulate


def test_each_process_keeps_programs_in_a_folder_of_its_own(simulate: Callable[..., None], tmp_path: Path) -> None:
    told: list[tuple[str, bool]] = []
    simulate(lambda path, readonly: told.append((path, readonly)))
    assert xla.keep_programs(tmp_path / "xla") == f"compiled programs are kept in {tmp_path}/xla/process-3"
    assert told == [(f"{tmp_path}/xla/process-3", False)]
    assert Path(told[0][0]).is_dir()


def test_a_folder_that_the_user_has_named_stays(simulate: Callable[..., None]) -> None:
    simulate(pytest.fail)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(xla.CACHE_VARIABLE, "/elsewhere")
        assert xla.keep_programs(Path("/not/asked")) == "compiled programs are kept in /elsewhere"


def test_a_process_that_has_compiled_says_how_to_name_one(simulate: Callable[..., None], tmp_path: Path) -> None:
    def too_late(path: str, readonly: bool) -> None:
        raise AssertionError

    simulate(too_late)
    assert f"Set {xla.CACHE_VARIABLE}={tmp_path}" in xla.keep_programs(tmp_path)


def test_a_folder_that_cannot_be_made_is_said(simulate: Callable[..., None], tmp_path: Path) -> None:
    simulate(pytest.fail)
    (tmp_path / "a file").touch()
    assert "cannot be written to: " in xla.keep_programs(tmp_path / "a file")


def test_the_cpu_device_keeps_none(simulate: Callable[..., None], tmp_path: Path) -> None:
    simulate(pytest.fail, device="CPU")
    assert "cannot read them again" in xla.keep_programs(tmp_path)
    assert xla.CACHE_VARIABLE not in os.environ


def test_one_built_for_another_torch_says_which_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch_xla.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    assert "undefined symbol" in xla.why_missing()
    assert "install the two of the same number" in xla.why_missing()
