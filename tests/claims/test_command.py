"""The ``lightning-accel claims`` command: what it prints and writes, and what becomes of a row that breaks off."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_accel.__main__ import main
from lightning_accel.claims import record
from lightning_accel.claims.chart import multiple, svg
from lightning_accel.claims.claim import Claim, Figure, Missing, NotHereError, Target, counted
from lightning_accel.claims.command import write
from lightning_accel.claims.machine import machine, slug, title
from lightning_accel.claims.page import number_text, page
from lightning_accel.claims.record import Record, measured, row_numbers

DOCS = Path(__file__).parents[2] / "docs"
OUTCOMES = {"holds", "holds when", "no longer holds"}
CLAIM = Claim(row=1, text="a claim", claimed="2x", why=dict.fromkeys(OUTCOMES, "the reason"))
MET = counted("large", 3.0, "x", Target("at least", 2.0), note="6 ms to 2 ms")
MISSED = Figure(condition="small", value=1.0, low=0.9, high=1.1, target=Target("at least", 2.0))


def a_row(*found: Any) -> record.Row:
    def measure() -> Iterator[Any]:
        for figure in found:
            if isinstance(figure, Exception):
                raise figure
            yield figure

    return measured(CLAIM, measure)


def a_record(*rows: record.Row, **machine: Any) -> Record:
    about = {"device": "a machine", "kind": "cpu", "instructions": "AVX2", "native_bf16": False}
    about |= {"cores": 2, "threads": 2, "torch": "2", "python": "3", **machine}
    return Record(machine=about, date="2026-01-01", rows=rows)


# -- the rows ----------------------------------------------------------------------------------------------------------


def test_there_is_a_row_for_each_of_the_nineteen_claims() -> None:
    assert sorted(row_numbers()) == list(range(1, 20))


@pytest.mark.parametrize("number", sorted(row_numbers()))
def test_a_row_says_what_is_claimed_and_has_a_reason_for_every_outcome(number: int) -> None:
    claim = import_module(f"lightning_accel.claims.{row_numbers()[number]}").CLAIM
    assert claim.row == number
    assert claim.text
    assert claim.claimed
    assert set(claim.why) == OUTCOMES


def test_a_row_s_reason_is_that_of_its_outcome() -> None:
    claim = Claim(row=1, text="a claim", claimed="2x", why={o: f"why it {o}" for o in OUTCOMES})
    row = measured(claim, lambda: [MET, MISSED])
    assert (row.verdict, row.why) == ("holds when large", "why it holds when")


def test_a_row_that_lacks_something_says_what() -> None:
    row = a_row(NotHereError("needs a GPU"))
    assert (row.verdict, row.why, row.has_failed) == ("not measured here", "needs a GPU", False)


def test_a_row_of_nothing_but_missing_conditions_is_not_measured() -> None:
    row = a_row(Missing("TensorRT", "pip install torch-tensorrt"))
    assert (row.verdict, row.why) == ("not measured here", "pip install torch-tensorrt")


def test_an_error_in_a_benchmark_is_written_down_with_what_was_measured_before() -> None:
    row = a_row(MET, RuntimeError("out of luck"))
    assert (row.verdict, row.why, row.has_failed) == ("failed", "RuntimeError: out of luck", True)
    assert row.figures == (MET,)


@pytest.mark.slow
def test_several_rows_are_measured_in_the_order_of_their_numbers_each_apart() -> None:
    found = record.measure_rows([19, 18, 19])
    assert [(row.row, row.verdict) for row in found.rows] == [(18, "not measured here"), (19, "not measured here")]


def test_a_process_that_dies_fails_its_row_and_not_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "measure_row", os._exit)
    found = record.measure_rows([18, 19])
    assert [(row.row, row.has_failed) for row in found.rows] == [(18, True), (19, True)]
    assert {row.why for row in found.rows} == {"its process came to a sudden end"}


# -- what is written ---------------------------------------------------------------------------------------------------


def test_a_record_comes_back_from_json_as_it_was() -> None:
    made = a_record(a_row(MET, MISSED, Missing("TensorRT", "not here")), a_row(NotHereError("needs a GPU")))
    assert Record.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def lines_of(text: str, start: str) -> list[list[str]]:
    """The cells of the table's lines that start so."""
    lines = re.findall(rf"^\| {re.escape(start)} .*$", text, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_page_has_a_line_a_claim_with_every_machine_s_verdict_and_figures() -> None:
    mine, other = a_record(a_row(MET, MISSED)), a_record(a_row(MET), device="another", native_bf16=True)
    (line,) = lines_of(page([mine, other]), "[1](#claim-1)")
    assert line[1:] == ["a claim", "2x", "**holds when** (1 of 2)<br>3.00x ✓, 1.00x ✗", "**holds**<br>3.00x ✓"]


def test_a_machine_s_conditions_stand_in_the_head_of_its_column() -> None:
    mine, other = a_record(a_row(MET)), a_record(a_row(MET), device="another", native_bf16=True)
    (head,) = lines_of(page([mine, other]), "#")
    assert head[3:] == [
        "a machine, AVX2, 2 cores, no bfloat16 in hardware",
        "another, AVX2, 2 cores, bfloat16 in hardware",
    ]


def test_the_page_has_a_line_a_condition_with_every_machine_s_figure() -> None:
    beside = counted("beside", 9.0, "x")
    mine, other = a_row(MET, MISSED, beside), a_row(MET, Missing("small", "not installed"))
    text = page([a_record(mine), a_record(other, device="another")])
    assert lines_of(text, "large") == [["large", "at least 2.00x", *["**3.00x** ✓<br>6 ms to 2 ms"] * 2]]
    expected = ["small", "at least 2.00x", "**1.00x** [0.90x to 1.10x] ✗", "not here: not installed"]
    assert lines_of(text, "small") == [expected]
    assert lines_of(text, "beside") == [["beside", "", "**9.00x**", ""]]


def test_the_page_gives_each_verdict_its_reason_and_machines_of_one_mind_a_line() -> None:
    records = [a_record(a_row(*found), device=name) for name, found in {"A": [MET], "B": [MISSED], "C": [MET]}.items()]
    where = "AVX2, 2 cores, no bfloat16 in hardware"
    text = page(records)
    assert f"- A, {where}; C, {where}: **holds**: the reason." in text
    assert f"- B, {where}: **no longer holds**: the reason." in text


def test_a_claim_that_one_machine_has_no_row_of_leaves_its_cell_empty() -> None:
    (line,) = lines_of(page([a_record(), a_record(a_row(MET), device="another")]), "[1](#claim-1)")
    assert line[3:] == ["", "**holds**<br>3.00x ✓"]


def test_bars_in_a_cell_do_not_break_the_table() -> None:
    text = page([a_record(measured(CLAIM, lambda: [counted("|x| > 0", 1.0, "x")]))])
    (line,) = re.findall(r"^\| \\\|x\\\| .*$", text, flags=re.MULTILINE)
    assert len(re.findall(r"(?<!\\)\|", line)) == 4


def test_the_chart_has_two_bars_and_both_numbers_for_every_judged_figure() -> None:
    chart = svg(a_record(a_row(MET, MISSED, counted("beside", 9.0, "x"))))
    root = ElementTree.fromstring(chart)
    bars = [e for e in root.iter() if e.tag.endswith("rect") and e.get("height") in ("6", "8")]
    words = [e.text or "" for e in root.iter() if e.tag.endswith("text")]
    assert len(bars) == 4
    assert {"claimed 2.00x", "3.00x", "1.00x"} <= set(words)
    lengths = [float(bar.get("width") or 0) for bar in bars]
    assert lengths[1] > lengths[0] == lengths[2] > lengths[3]


def test_in_the_chart_less_is_better_where_at_most_is_claimed() -> None:
    def length(value: float) -> float:
        chart = svg(a_record(a_row(counted("error", value, "error", Target("at most", 1e-4)))))
        bars = [e for e in ElementTree.fromstring(chart).iter() if e.get("height") == "8"]
        return float(bars[0].get("width") or 0)

    assert length(5e-5) > length(1e-4) > length(2e-4)
    assert length(0.0) > 0


def test_in_the_chart_nearer_is_better_where_about_a_number_is_claimed() -> None:
    near, far, below = (counted("ratio", value, "x", Target("about", 1)) for value in (1.05, 2.0, 0.5))
    assert multiple(near.value, near) > multiple(far.value, far) == multiple(below.value, below)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.234, "x", "1.23x"), (3456.7, "x", "3,457x"), (0.123, "%", "12.3%"), (1.2e-7, "error", "1.2e-07")],
)
def test_numbers_are_written_in_their_unit(value: float, unit: Any, text: str) -> None:
    assert number_text(value, unit) == text


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_one_row_is_measured_and_printed_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "--row", "9"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"│ 9 +│", out)
    assert re.search(r"row 9, \d+ s: ", err)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.medium
def test_json_is_all_there_is_on_the_standard_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["claims", "--row", "9", "--json", "--out", str(tmp_path / "new" / "folder")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in found["rows"]] == [9]
    written = tmp_path / "new" / "folder"
    name = slug(found["machine"])
    files = sorted(str(file.relative_to(written)) for file in written.rglob("*.*"))
    assert files == ["claims.md", f"claims/{name}.json", f"claims/{name}.svg"]
    assert json.loads((written / "claims" / f"{name}.json").read_text()) == found
    assert (written / "claims.md").read_text() == page([Record.from_dict(found)])


def kept_in(folder: Path) -> dict[str, Record]:
    """Every machine's record, by the name of its device."""
    found = [Record.from_dict(json.loads(path.read_text())) for path in (folder / "claims").glob("*.json")]
    return {of.machine["device"]: of for of in found}


def test_a_machine_gets_a_column_of_its_own_and_another_s_stays_as_it_is(tmp_path: Path) -> None:
    other = a_record(a_row(MET), device="another machine")
    (tmp_path / "claims").mkdir()
    write(tmp_path, other)
    assert main(["claims", "--row", "18", "--out", str(tmp_path)]) == 0
    found = kept_in(tmp_path)
    assert found.keys() == {"another machine", machine()["device"]}
    assert found["another machine"] == other
    for about in (other.machine, machine()):
        assert f"| {title(about)} |" in (tmp_path / "claims.md").read_text()


def test_single_rows_replace_those_of_this_machine_s_record_and_leave_its_others(tmp_path: Path) -> None:
    older = a_record(a_row(MET), replace(a_row(MET), row=18), **machine())
    (tmp_path / "claims").mkdir()
    write(tmp_path, older)
    assert main(["claims", "--row", "18", "--out", str(tmp_path)]) == 0
    rows = kept_in(tmp_path)[machine()["device"]].rows
    assert [(row.row, row.verdict) for row in rows] == [(1, "holds"), (18, "not measured here")]


def test_single_rows_do_not_join_a_record_of_other_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "claims").mkdir()
    write(tmp_path, a_record(a_row(MET), **{**machine(), "torch": "1.0"}))
    assert main(["claims", "--row", "18", "--out", str(tmp_path)]) == 2
    complaint = capsys.readouterr().err
    assert f"was measured with torch 1.0, here is torch {torch.__version__}" in complaint
    assert "without --row" in complaint


def test_a_failed_row_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"lightning_accel.claims.{row_numbers()[9]}")
    monkeypatch.setattr(module, "measure", lambda: 1 / 0)
    assert main(["claims", "--row", "9"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--row", "20"], "--row 20: there is none. Allowed: 1 to 19"),
        (["--row", "0"], "--row 0: there is none"),
        (["--row", "9", "--out", "file/folder"], "--out file/folder: no folder can be made there"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert main(["claims", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from lightning_accel.__main__ import main\n"
        "try: main(['claims', '--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# -- the page in the docs ----------------------------------------------------------------------------------------------


def records_in_docs() -> dict[Path, Record]:
    paths = sorted((DOCS / "claims").glob("*.json"))
    assert paths
    return {path: Record.from_dict(json.loads(path.read_text(encoding="utf-8"))) for path in paths}


def test_the_page_and_the_charts_in_the_docs_are_those_of_the_records() -> None:
    records = records_in_docs()
    assert (DOCS / "claims.md").read_text(encoding="utf-8") == page(list(records.values()))
    for path, kept in records.items():
        assert path.stem == slug(kept.machine)
        assert path.with_suffix(".svg").read_text(encoding="utf-8") == svg(kept)


def test_the_verdicts_in_the_docs_are_those_of_the_rule() -> None:
    for kept in records_in_docs().values():
        assert [row.row for row in kept.rows] == list(range(1, 20))
        for row in kept.rows:
            assert not row.has_failed
            assert row.verdict == record.verdict_of(row.figures)[1]
