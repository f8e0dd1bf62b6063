"""A report as a file: three forms of the same, whatever is in it."""

from __future__ import annotations

import json
import re
import stat
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from typing_extensions import override

from evidence.test_report_model import huge, tuned_record
from lightning_accel.evidence.figures import MEND
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.render import FORMS, form_of, to_html, to_json, to_markdown, write
from lightning_accel.evidence.report_model import Page, page_of
from report_schema import SCHEMA, schema
from support.reported_runs import MIB, ODD, PEAKS, record_of, steps, told, tuned, with_header

_EMPTY = {"meta", "link", "br", "use", "path", "img", "hr", "input"}


class Shown(HTMLParser):
    """What a browser would show of a page, and whether its elements are closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self.open.append(tag)

    @override
    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @override
    def handle_endtag(self, tag: str) -> None:
        if tag not in _EMPTY:
            assert self.open.pop() == tag

    @override
    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


def tables_of(markdown: str) -> list[list[str]]:
    """The lines of each table."""
    found = re.findall(
        r"(?:^\|.*\n)+", re.sub(r"^(`{3,}).*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return [table.strip().split("\n") for table in found]


def columns(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def everything(name: str = ODD) -> Record:
    """A record with something for each part of a page, and a text in every place that a user has a say in."""
    record = record_of(cards={"power_w_mean": 200.0})
    assert record.anatomy is not None
    assert record.memory is not None
    copy = replace(record.anatomy.copies[0], line=name, made_by=name)
    modules = [replace(one, module=one.module and f"a.{name}", kind=name) for one in record.anatomy.modules]
    memory = replace(record.memory, modules={name: 9 * MIB})
    anatomy = replace(record.anatomy, modules=modules[:2], copies=[copy], waits={name: 2})
    technique = {"status": name, "applied": {name: name, "b": name}, "refused": {f"{name}2": name}, "details": name}
    known = told(compile=technique) | tuned(1.5, 1.4, "inf", {"precision": "bf16-mixed"}, 20)
    known["report"]["notes"] = [name]
    return with_header(
        replace(record, anatomy=anatomy, memory=memory, passed_over=[Path(name)], **known),
        settings={"precision": "auto", "report": "report.html"},
        command=["train.py", name],
        model=name,
        machine=name,
    )


# -- three forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_file_has_the_form_that_its_ending_says(tmp_path: Path, form: str) -> None:
    path = tmp_path / "new" / f"report{form}"
    write(page_of(record_of()), path)
    begins = {".html": "<!doctype html>", ".md": "# A run of 64 steps", ".json": "{"}
    assert path.read_text(encoding="utf-8").lstrip().startswith(begins[form])


def test_another_ending_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"ends in \.html, \.md, \.json, not 'report\.pdf'"):
        form_of(Path("report.pdf"))


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        write(page_of(record_of()), tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_others_may_read_it(tmp_path: Path) -> None:
    write(page_of(record_of()), tmp_path / "report.html")
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o644


# -- JSON, by a schema ---------------------------------------------------------------------------------------------


def test_the_schema_is_that_of_a_page() -> None:
    found = schema()
    if "description" not in found:
        pytest.skip("this pydantic leaves out what dataclasses say of themselves")
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == found, "write it anew: make stub"


@pytest.mark.parametrize(
    "record", [record_of(), everything(), record_of(anatomy=None, memory=None, steps=[], epochs=[])]
)
def test_json_is_a_page_by_that_schema(record: Record) -> None:
    page = page_of(record, peaks=PEAKS)
    assert asdict(TypeAdapter(Page).validate_json(to_json(page), strict=True)) == asdict(page)


def test_json_knows_no_infinity() -> None:
    found = json.loads(to_json(page_of(everything())), parse_constant=pytest.fail)
    assert found["trials"][0]["high"] is None


# -- whatever is in it ---------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_names_and_texts_of_users_are_shown_and_never_markup() -> None:
    shown = Shown(to_html(page_of(everything(), peaks=PEAKS)))
    assert {"onclick"}.isdisjoint(name for _, attributes in shown.tags for name in attributes)
    assert sum(ODD in text for text in shown.text) > 10


def test_markdown_keeps_its_columns_whatever_is_in_them() -> None:
    for table in tables_of(to_markdown(page_of(everything("a | b\n\\| ``` <b> &amp; *"), peaks=PEAKS))):
        assert {columns(row) for row in table} == {columns(table[0])}, table[0]


def test_markdown_has_no_element_of_a_users() -> None:
    text = re.sub(r"(`+).*?\1", "", to_markdown(page_of(everything(), peaks=PEAKS)), flags=re.DOTALL)
    assert "<b" not in text


@pytest.mark.medium
def test_it_needs_nothing_from_elsewhere() -> None:
    shown = Shown(to_html(page_of(everything(), peaks=PEAKS)))
    asked_for = [
        value
        for tag, attributes in shown.tags
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "srcset", "data", "action")
    ]
    assert [value for value in asked_for if not value.startswith(("#", "data:,"))] == []


@pytest.mark.medium
@pytest.mark.parametrize("form", FORMS)
def test_a_huge_model_and_a_long_run_fit_in_two_megabytes(form: str) -> None:
    assert len(FORMS[form](page_of(huge(), peaks=PEAKS)).encode()) < 2_000_000


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "record",
    [
        record_of(steps=[], epochs=[], anatomy=None, memory=None, status=""),
        record_of(epochs=[]),
        record_of(anatomy=None, memory=None),
        record_of(page="out of memory\n\nstep 3 `did` not fit\n```"),
        record_of(steps=[steps(1, 10.0, losses=[(1, float("nan"))])]),
        tuned_record(1.0, 0.9, "inf", {}),
        with_header(record_of(), settings={"warp_drive": "on"}, device_bytes=0, loaders=[], parameters=None),
    ],
    ids=["no steps", "no epochs", "no anatomy", "out of memory", "NaN", "nothing won", "of another version"],
)
def test_what_is_not_known_is_left_out(record: Record, form: str) -> None:
    text = FORMS[form](page_of(record))
    assert "None" not in text
    assert not re.search(r"\bnan\b", text)


def test_predictions_and_what_they_have_come_to_are_in_a_table() -> None:
    earlier = with_header(record_of(steps=[steps(1, 10.0, wait_ms=5.0)]), started="2026-11-22T12:00:00+00:00")
    page = page_of(record_of(steps=[steps(1, 5.0)]), [earlier])
    for text in (to_html(page), to_markdown(page)):
        assert "Earlier predictions, and what was measured" in text
        assert "2.00x [2.00, 2.00]" in text


# -- without matplotlib --------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_without_matplotlib_there_are_tables_and_a_line_on_how_to_get_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_of(record_of(), peaks=PEAKS)
    with_charts = to_html(page)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    without = to_html(page)
    assert with_charts.count("<svg") == 4
    assert MEND.split(":")[0] not in with_charts
    assert "<svg" not in without
    assert MEND.replace("'", "&#39;") in without
    assert without.count("<table") == with_charts.count("<table")
