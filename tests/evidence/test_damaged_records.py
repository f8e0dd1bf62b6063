"""Records that are not as they were written: they are reported, or said to be damaged, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_accel import AccelPlugin
from lightning_accel.core.measured import Measurement
from lightning_accel.core.states import SiteChanged
from lightning_accel.evidence.events import KINDS, line_of
from lightning_accel.evidence.record_reader import RecordError, read_earlier, read_record
from lightning_accel.evidence.render import to_json, to_markdown
from lightning_accel.evidence.report_model import page_of
from lightning_accel.evidence.served import Served, ServedForm
from lightning_accel.settings import Plan
from support.reported_runs import Nested, make_trainer, tuned, vectors
from support.technique_table import off

Lines = list[dict[str, Any]]
WRONG: tuple[Any, ...] = (None, "x", -1, [], {}, [None], {"x": None}, True)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Of a real run with the plugin, each kind of them."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_ACCEL_CACHE", str(folder / "remembered"))
        make_trainer(folder, AccelPlugin.from_plan(Plan().replace(**off()))).fit(Nested(), vectors())
    found = [json.loads(line) for line in read_record(folder).path.read_text().splitlines()]
    tuning = tuned(1.5, 1.4, 1.6, {"compile": "on"}, 5)
    site = SiteChanged("compile", "", None, "ON", "x", Measurement(error=1.0))
    form = {"name": "eager", "p50_ms": 1.0, "p95_ms": 1.0, "p99_ms": 1.0, "speedup": 1.0, "low": 1.0, "high": None}
    forms = [ServedForm(**form, disk_bytes=1, error=None, scores={"accuracy": 1.0}, drops={}, is_worse=False)]
    served = Served(checkpoint="x", forms=forms, left_out={"y": "z"}, max_drop=0.1, recommended="eager", why="alone")
    told = (*tuning["trials"].values(), tuning["held"], site, served)
    found[2:2] = [json.loads(line_of(event)) for event in told]
    assert {line["kind"] for line in found} == KINDS.keys()
    return found


def write(folder: Path, lines: Lines) -> Path:
    path = folder / "version_0" / "accel" / "20261123-1.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is something, at any depth; of lists the first item, and of many keys a few."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in list(value)[:40]:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def with_wrong(lines: Lines, path: tuple[Any, ...], value: Any) -> Lines:
    changed = copy.deepcopy(lines)
    target: Any = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return changed


def reported(path: Path) -> bool:
    """Whether there is a report of it; else it is said to be damaged, or no record."""
    try:
        record = read_record(path)
        page = page_of(record, read_earlier(record))
    except RecordError as error:
        if str(path) not in str(error):
            pytest.fail(f"does not say which record: {error}")
        return False
    assert to_markdown(page)
    assert json.loads(to_json(page))["format"] == 1
    return True


@pytest.mark.parametrize("kind", [*KINDS])
def test_a_value_of_another_kind_is_damage_or_does_not_matter(lines: Lines, kind: str, tmp_path: Path) -> None:
    (number,) = [place for place, line in enumerate(lines) if line["kind"] == kind][:1]
    for place, path in enumerate(places(lines[number])):
        reported(write(tmp_path, with_wrong(lines, (number, *path), WRONG[place % len(WRONG)])))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "run"])
def test_a_run_without_such_lines_has_a_report(lines: Lines, kind: str, tmp_path: Path) -> None:
    assert reported(write(tmp_path, [line for line in lines if line["kind"] != kind]))


def test_a_run_that_was_killed_while_it_wrote_has_a_report(lines: Lines, tmp_path: Path) -> None:
    path = write(tmp_path, lines)
    path.write_text(path.read_text()[:-50])
    assert reported(path)
    assert page_of(read_record(path)).remarks[0].startswith("the record has no end")


def test_a_run_that_has_only_begun_has_a_report(lines: Lines, tmp_path: Path) -> None:
    assert reported(write(tmp_path, lines[:1]))


def test_lines_of_kinds_to_come_are_passed_over(lines: Lines, tmp_path: Path) -> None:
    assert reported(write(tmp_path, [*lines, {"kind": "weather", "rain": True}]))


@pytest.mark.parametrize("first", [{"kind": "run", "format": 2}, {"kind": "run"}, {"kind": "x"}, []])
def test_a_record_of_another_version_or_none_is_told_apart(first: Any, lines: Lines, tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        read_record(write(tmp_path, [first, *lines[1:]]))
