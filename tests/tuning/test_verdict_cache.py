"""What trials of parts have found holds for a later run of the very same program, and for no other."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel.core.measured import Measurement
from lightning_accel.core.states import VerdictKind
from lightning_accel.experiment.store import Key
from lightning_accel.techniques.technique_context import Verdict
from lightning_accel.tuning import verdict_cache
from lightning_accel.tuning.verdict_cache import VERDICTS, program_key

SOURCE = """
from torch import nn

class Model(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) {ending}
"""

DECISIONS = {"flash_attention": {"layer": Verdict("kept", "faster", choices={"a": "sdpa"})}}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the program anew, as a later process would read it: ``program(heads=2, ending="")``."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(*, ending: str = "", batch: Any = None, settings: str = "a plan", **options: Any) -> Key | None:
        (tmp_path / "my_program.py").write_text(SOURCE.format(ending=ending))
        sys.modules.pop("my_program", None)
        importlib.invalidate_caches()
        model: nn.Module = importlib.import_module("my_program").Model(**options)
        return program_key(model, torch.ones(8, 4) if batch is None else batch, "a machine", settings)

    yield make
    sys.modules.pop("my_program", None)


def test_figures_are_remembered_with_the_verdict(program: Any) -> None:
    measured = Measurement(error=1e-6, spread=2e-6, is_same=False, original_ms=2.0, candidate_ms=1.0)
    decisions = {"flash_attention": {"layer": Verdict("kept", measured=measured)}}
    verdict_cache.remember(program(), decisions)
    known = verdict_cache.recall(program())
    assert known is not None
    assert known.decisions == decisions


def test_the_same_program_finds_what_it_has_tried(program: Any) -> None:
    verdict_cache.remember(program(), DECISIONS)
    known = verdict_cache.recall(program())
    assert known is not None
    assert known.decisions == DECISIONS


@pytest.mark.parametrize(
    "change",
    [
        {"ending": "* 2"},
        {"heads": 4},
        {"batch": torch.ones(9, 4)},
        {"batch": torch.ones(8, 4, dtype=torch.float64)},
        {"settings": "another plan"},
    ],
    ids=["source", "a setting of the model", "shapes", "dtype", "the plan"],
)
def test_whatever_a_verdict_hangs_on_has_it_tried_again(program: Any, change: dict[str, Any]) -> None:
    verdict_cache.remember(program(), DECISIONS)
    assert verdict_cache.recall(program(**change)) is None


def test_another_number_of_threads_has_it_tried_again(program: Any) -> None:
    verdict_cache.remember(program(), DECISIONS)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert verdict_cache.recall(program()) is None
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("where", ["argv", "installed"])
def test_another_command_line_or_version_has_it_tried_again(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    verdict_cache.remember(program(), DECISIONS)
    if where == "argv":
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--scale=30"])
    else:
        (tmp_path / "some_library-2.0.dist-info").mkdir()
    assert verdict_cache.recall(program()) is None


class RaisesWhenRead(types.ModuleType):
    """Of an optional library that is not there."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"no {name}")


def test_modules_that_raise_when_they_are_read_do_not_stand_in_the_way(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = program()
    monkeypatch.setitem(sys.modules, "raises_when_read", RaisesWhenRead("raises_when_read"))
    monkeypatch.setitem(sys.modules, "no_module", 1)
    assert program() == expected is not None


def test_modules_that_load_when_they_are_read_are_not_loaded(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_one.py").write_text("raise AssertionError('it was loaded')")
    spec = importlib.util.spec_from_file_location("lazy_one", tmp_path / "lazy_one.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_one", lazy)
    spec.loader.exec_module(lazy)
    assert program() is not None


def test_what_cannot_be_described_is_tried_every_time(program: Any) -> None:
    assert program(heads=iter([1])) is None


def test_a_model_that_raises_when_it_is_looked_at_is_tried_every_time() -> None:
    class Raises(nn.Module):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("user's own")

    assert program_key(Raises(), torch.ones(2), "a machine", "") is None


def test_a_model_written_at_a_prompt_is_tried_every_time() -> None:
    """Nothing tells what its code was."""
    kind = type("Typed", (nn.Module,), {"__module__": "no_such_module"})
    assert program_key(kind(), torch.ones(2), "a machine", "") is None


@pytest.mark.parametrize("kind", ["failed", "untried", "too_dear"])
def test_what_could_not_be_found_out_is_tried_again(program: Any, kind: VerdictKind) -> None:
    verdict_cache.remember(program(), {**DECISIONS, "compile": {"layer": Verdict(kind, "a reason")}})
    known = verdict_cache.recall(program())
    assert known is not None
    assert known.decisions == DECISIONS


def test_what_is_older_than_a_week_is_tried_again(program: Any) -> None:
    verdict_cache.remember(program(), DECISIONS)
    (path,) = VERDICTS.paths()
    content = json.loads(path.read_text())
    content["written"] = (datetime.now(timezone.utc) - timedelta(days=8)).isoformat()
    path.write_text(json.dumps(content))
    assert verdict_cache.recall(program()) is None


OTHER_KIND = {"kind": "liked", "reason": "", "choices": {}, "measured": None}


@pytest.mark.parametrize(
    "value", [[], {}, {"decisions": {}}, {"decisions": {"loss": {"": OTHER_KIND}}, "tuning": None}]
)
def test_a_damaged_file_is_as_none(program: Any, value: Any) -> None:
    VERDICTS.put(program(), value)
    assert verdict_cache.recall(program()) is None
