"""A report names every site and every reason, in text and in JSON."""

from __future__ import annotations

import json

import pytest

from lightning_accel.core.measured import Measurement
from lightning_accel.core.report import Report


@pytest.fixture
def report() -> Report:
    report = Report(device="TPU-9 (cpu)")
    report.of("precision").status = "32-true: as asked"
    record = report.of("memory_format")
    record.status, record.is_on = "in force", True
    report.of("memory_format").sites.change("", "ON", "weight → channels_last")
    for index in range(9):
        report.of("memory_format").sites.change(f"blocks.{index}", "ON", "weight → channels_last")
    report.of("memory_format").sites.change("lazy", "OFF", "its weight is lazy")
    report.note("no compiler")
    return report


def test_it_tells_where_a_technique_is_in_force(report: Report) -> None:
    assert report.applied("memory_format") == ["", *(f"blocks.{i}" for i in range(9))]


def test_it_tells_what_was_refused_and_why(report: Report) -> None:
    assert report.refused("memory_format") == {"lazy": "its weight is lazy"}


def test_what_live_trials_have_switched_off_says_so_unless_it_had_nothing_to_do(report: Report) -> None:
    report.of("loss").status = "no site in this model"
    report.settled({"memory_format", "loss"})
    assert report.of("memory_format").line == "off, as live trials have settled without it; before: in force"
    assert report.of("loss").line == "no site in this model"


def test_an_unknown_technique_has_done_nothing(report: Report) -> None:
    assert (report.applied("magic"), report.refused("magic")) == ([], {})
    assert "magic" not in report.techniques


def test_a_refused_site_is_no_longer_applied_and_the_other_way_round(report: Report) -> None:
    report.of("memory_format").sites.change("blocks.0", "OFF", "slower")
    assert "blocks.0" not in report.applied("memory_format")
    report.of("memory_format").sites.change("blocks.0", "ON", "faster after all")
    assert "blocks.0" not in report.refused("memory_format")


def test_a_note_is_said_once(report: Report) -> None:
    report.note("no compiler")
    assert report.notes == ["no compiler"]


def test_a_note_replaces_the_one_with_its_key(report: Report) -> None:
    report.note("out of memory: it needed 3 GiB", key="step 7")
    report.note("no kernel")
    report.note("out of memory: peak 2 GiB", key="step 7")
    assert report.notes == ["no compiler", "no kernel", "out of memory: peak 2 GiB"]


def test_the_summary_is_a_line_a_technique(report: Report) -> None:
    assert report.summary().splitlines() == [
        "lightning-accel on TPU-9 (cpu)",
        "  - precision: 32-true: as asked",
        "  + memory_format: in force (10 sites, 1 left alone)",
        "  ! no compiler",
    ]


def test_the_text_names_the_sites_and_groups_those_with_the_same_remark(report: Report) -> None:
    text = report.to_text()
    assert "(model), blocks.0, blocks.1, blocks.2, blocks.3, blocks.4, … and 4 more: weight → channels_last" in text
    assert "  lazy: its weight is lazy" in text
    assert str(report) == text


def test_the_json_leaves_nothing_out(report: Report) -> None:
    read = json.loads(report.to_json())
    assert read == report.to_dict()
    assert len(read["techniques"]["memory_format"]["applied"]) == 10
    assert read["notes"] == ["no compiler"]
    assert read["device"] == "TPU-9 (cpu)"


def test_figures_are_of_the_sites_in_force_and_of_the_others_where_none_is() -> None:
    report = Report()
    slow, fast = Measurement(original_ms=1.0, candidate_ms=2.0), Measurement(original_ms=2.0, candidate_ms=1.0)
    report.of("compile").sites.change("a", "OFF", "slower", slow)
    assert report.of("compile").figures() == slow
    report.of("compile").sites.change("b", "ON", "faster", fast)
    assert report.of("compile").figures() == fast
    report.of("compile").sites.change("b", "OFF", "failed in mid-run")
    assert report.to_dict()["techniques"]["compile"]["measured"] == {"original_ms": 3.0, "candidate_ms": 3.0}


def test_what_it_hands_out_are_copies(report: Report) -> None:
    report.refused("memory_format").clear()
    report.applied("memory_format").clear()
    assert report.refused("memory_format")
    assert report.applied("memory_format")


def test_a_notebook_shows_its_text_and_takes_none_of_it_for_markup(report: Report) -> None:
    report.note("a <b> & c")
    assert repr(report) == report.to_text()
    assert report._repr_html_().startswith("<pre>lightning-accel on TPU-9 (cpu)")
    assert "a &lt;b&gt; &amp; c" in report._repr_html_()


@pytest.mark.parametrize(("release", "said"), [("2.15.0+cu132", 0), ("2.16.0a0+git1", 1), ("3.0", 1)])
def test_a_torch_newer_than_those_tested_is_said_once(release: str, said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", release)
    assert str(Report(device="CPU").to_text()).count("newer than those tested") == said
