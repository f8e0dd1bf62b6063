"""The ``lightning-accel claims`` command: what it prints and writes, and what becomes of a row that breaks off."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_accel.__main__ import main
from lightning_accel.claims import record
from lightning_accel.claims.chart import multiple, svg
from lightning_accel.claims.claim import Claim, Figure, Missing, NotHereError, Target, counted
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


def a_record(*rows: record.Row) -> Record:
    about = {"device": "a machine", "cores": 2, "threads": 2, "torch": "2", "python": "3"}
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


def test_the_page_has_a_line_a_row_with_figures_intervals_verdict_reason_and_command() -> None:
    text = page(a_record(a_row(MET, MISSED, Missing("TensorRT", "not installed"))))
    (line,) = re.findall(r"^\| 1 .*--row.*$", text, flags=re.MULTILINE)
    assert "large: **3.00x**<br>small: **1.00x** [0.90x to 1.10x]" in line
    assert line.endswith("| **holds when large** | the reason | `lightning-accel claims --row 1` |")
    assert "a machine" in text


def test_the_page_has_a_line_a_figure_with_what_is_claimed_of_it_and_whether_it_is_met() -> None:
    text = page(a_record(a_row(MET, MISSED, counted("beside", 9.0, "x"), Missing("TensorRT", "not installed"))))
    assert "| 1 | large | at least 2.00x | 3.00x | counted | yes | 6 ms to 2 ms |" in text
    assert "| 1 | small | at least 2.00x | 1.00x | 0.90x to 1.10x | no |  |" in text
    assert "| 1 | beside |  | 9.00x | counted |  |  |" in text
    assert "| 1 | TensorRT |  | not here |  |  | not installed |" in text


def test_bars_in_a_cell_do_not_break_the_table() -> None:
    text = page(a_record(measured(CLAIM, lambda: [counted("|x| > 0", 1.0, "x")])))
    for line in re.findall(r"^\| 1 .*$", text, flags=re.MULTILINE):
        assert len(re.findall(r"(?<!\\)\|", line)) == 8


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


def test_one_row_is_measured_and_printed_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "--row", "9"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"│ 9 +│", out)
    assert re.search(r"row 9, \d+ s: ", err)
    assert list(Path.cwd().iterdir()) == []


def test_json_is_all_there_is_on_the_standard_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["claims", "--row", "9", "--json", "--out", str(tmp_path / "new" / "folder")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in found["rows"]] == [9]
    written = tmp_path / "new" / "folder"
    assert sorted(file.name for file in written.iterdir()) == ["claims.json", "claims.md", "claims.svg"]
    assert json.loads((written / "claims.json").read_text()) == found
    assert (written / "claims.md").read_text() == page(Record.from_dict(found))


def test_a_failed_row_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"lightning_accel.claims.{row_numbers()[9]}")
    monkeypatch.setattr(module, "measure", lambda: 1 / 0)
    assert main(["claims", "--row", "9"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--row", "20"], r"--row 20: there is none. Allowed: 1 to 19"),
        (["--row", "0"], r"--row 0: there is none"),
        (["--row", "four"], r"invalid int value: 'four'"),
        (["--row", "9", "--out", "file/folder"], r"--out file/folder: no folder can be made there"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    with pytest.raises(SystemExit) as stopped:
        main(["claims", *arguments])
    assert stopped.value.code == 2
    assert re.search(complaint, capsys.readouterr().err)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from lightning_accel.__main__ import main\n"
        "try: main(['claims', '--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# -- the page in the docs ----------------------------------------------------------------------------------------------


def test_the_page_and_the_chart_in_the_docs_are_those_of_the_record() -> None:
    kept = Record.from_dict(json.loads((DOCS / "claims.json").read_text(encoding="utf-8")))
    assert (DOCS / "claims.md").read_text(encoding="utf-8") == page(kept)
    assert (DOCS / "claims.svg").read_text(encoding="utf-8") == svg(kept)


def test_the_verdicts_in_the_docs_are_those_of_the_rule() -> None:
    kept = Record.from_dict(json.loads((DOCS / "claims.json").read_text(encoding="utf-8")))
    assert [row.row for row in kept.rows] == list(range(1, 20))
    for row in kept.rows:
        assert not row.has_failed
        assert row.verdict == record.verdict_of(row.figures)[1]
