"""Forms for serving in a report: which of them are the best in one way or another, and how they are shown."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from lightning_accel.evidence import charts, tables
from lightning_accel.evidence.record import append
from lightning_accel.evidence.record_reader import RecordError, read_record
from lightning_accel.evidence.render import to_html, to_markdown
from lightning_accel.evidence.report_model import page_of
from lightning_accel.evidence.served import Served, ServedForm
from support.reported_runs import record_of


def form(name: str, ms: float, drop: float | None, **others: Any) -> ServedForm:
    given = {"p95_ms": ms, "p99_ms": ms, "speedup": 10 / ms, "low": 9 / ms, "high": None, "disk_bytes": 4096}
    scores = {"accuracy": None if drop is None else 0.9 - drop}
    known = {"error": 0.01, "scores": scores, "drops": {"accuracy": drop}, "is_worse": False}
    return ServedForm(**{"name": name, "p50_ms": ms, **given, **known, **others})


def served(*forms: ServedForm) -> Served:
    known = {"left_out": {"onnx": "<not> installed"}, "max_drop": 0.01, "recommended": "int8", "why": "it is fast"}
    return Served(checkpoint="best.ckpt", forms=[form("eager", 10.0, 0.0), *forms], **known)


def test_on_the_frontier_is_what_no_other_form_beats_in_both() -> None:
    found = served(form("int8", 4.0, 0.02), form("bf16", 6.0, 0.01), form("fp16", 7.0, 0.015), form("lost", 5.0, None))
    assert [one.name for one in found.frontier()] == ["int8", "bf16", "eager"]


def test_without_a_metric_forms_are_set_against_their_error() -> None:
    bare = [replace(one, scores={}, drops={}, error=error) for one, error in zip(served().forms, [0.0], strict=True)]
    found = replace(served(), forms=[*bare, form("int8", 4.0, None, scores={}, drops={}, error=0.02)])
    assert [one.name for one in found.frontier()] == ["int8", "eager"]


def test_all_of_it_is_in_a_table_with_what_is_worse_named() -> None:
    record = replace(record_of(), served=served(form("int8", 4.0, 0.02, is_worse=True)))
    table = tables.of(page_of(record))["served"]
    assert table.heads[-4:] == ["on disk", "error", "accuracy", "accuracy lost"]
    assert [next(text for text, _ in row) for row in table.rows] == ["eager", "int8 (worse)"]
    assert ("2.50x (at least 2.25x)", 2.5) in table.rows[1]


@pytest.mark.medium
def test_the_page_has_a_plot_and_nothing_of_it_is_markup() -> None:
    page = page_of(replace(record_of(), served=served(form("<b>", 4.0, 0.02))))
    plot = charts.of(page)["served"]
    assert "&lt;b&gt;" in plot
    assert "<b>" not in plot
    assert plot in to_html(page)
    assert "&lt;not&gt; installed" in to_html(page)
    assert "Take **int8**: it is fast." in to_markdown(page)


def test_a_record_tells_the_latest_comparison_and_a_damaged_one_is_said(tmp_path: Any) -> None:
    path = tmp_path / "accel" / "run-1.jsonl"
    path.parent.mkdir()
    path.write_text(f'{{"kind": "run", "format": 1, {header()}}}\n')
    latency = {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    measured = {"latency": latency, "speedup": {"ratio": 1.0, "low": 1.0, "high": None}, "disk_bytes": 1, "error": None}
    found = {"forms": {"eager": {**measured, "scores": {}}}, "worse": {}, "left_out": {}, "max_drop": 0.01}
    for chosen in ("first", "eager"):
        append(path, Served.from_dict("best.ckpt", {**found, "recommended": chosen, "why": ""}))
    told = read_record(path).served
    assert told is not None
    assert (told.recommended, told.forms[0].p99_ms, told.forms[0].high) == ("eager", 3.0, None)
    with path.open("a") as file:
        file.write('{"kind": "served", "checkpoint": "best.ckpt", "forms": 1}\n')
    with pytest.raises(RecordError, match="is damaged"):
        read_record(path)


def header() -> str:
    import json

    return json.dumps(asdict(record_of().header))[1:-1]
