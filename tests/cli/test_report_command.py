"""``lightning-accel report``, of runs that have trained and of what is no run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_accel.__main__ import main
from lightning_accel.evidence import peaks
from lightning_accel.evidence.record_reader import read_record
from support.reported_runs import Nested, make_trainer, vectors


@pytest.fixture(autouse=True)
def _peaks_measured_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine, for every report: no test asks how high they are, and to measure them well takes a second."""
    monkeypatch.setitem(peaks._SIZE, "cpu", 64)
    monkeypatch.setitem(peaks._COPIED, "cpu", 1 << 16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plain run: of SpeedMemoryLogger alone."""
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder).fit(Nested(), vectors(60))
    return folder


@pytest.mark.medium
def test_it_writes_a_page_and_says_the_most_of_it(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(trained)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("A run of 60 steps without AccelPlugin: nothing was tried\n")
    assert said.endswith("All of it: report.html\n")
    assert Path("report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.medium
@pytest.mark.parametrize("form", ["md", "json"])
def test_other_forms_by_their_endings(trained: Path, form: str) -> None:
    assert main(["report", str(trained), "--out", f"new/report.{form}"]) == 0
    assert "nothing was tried" in Path(f"new/report.{form}").read_text(encoding="utf-8")


@pytest.mark.medium
def test_a_record_that_was_copied_elsewhere_serves_as_well(trained: Path) -> None:
    shutil.copy(read_record(trained).path, "a-record.jsonl")
    assert main(["report", "a-record.jsonl", "--out", "report.json"]) == 0
    assert json.loads(Path("report.json").read_text())["step_ms"] > 0


@pytest.mark.medium
def test_what_the_machine_can_do_is_measured_where_the_run_was_on_it(trained: Path) -> None:
    path = read_record(trained).path
    main(["report", str(path), "--out", "here.json"])
    elsewhere = path.read_text().replace('"machine": "', '"machine": "another ', 1)
    Path("there-1.jsonl").write_text(elsewhere)
    main(["report", "there-1.jsonl", "--out", "there.json"])
    assert json.loads(Path("here.json").read_text())["peaks"] is not None
    assert json.loads(Path("there.json").read_text())["peaks"] is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "does not exist"),
        ("", "is empty"),
        ("{}", "does not begin as the record of a run"),
        ('{"kind": "run", "format": 99}', "is written in format 99, of another version"),
        ('{"kind": "run", "format": 1}', "is damaged"),
        ("[1, 2]\n", "is damaged in line 1"),
    ],
    ids=["missing", "empty", "no record", "of another version", "incomplete", "damaged"],
)
def test_what_is_no_record_is_told_apart(
    content: str | None, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("run-1.jsonl").write_text(content)
    assert main(["report", "run-1.jsonl"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lightning-accel report: run-1.jsonl")
    assert complaint in said
    assert not Path("report.html").exists()


def test_a_folder_without_a_run_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    Path("nothing").mkdir()
    assert main(["report", "nothing"]) == 2
    assert "nothing holds no run" in capsys.readouterr().err


@pytest.mark.medium
@pytest.mark.parametrize("out", ["report.pdf", "file/report.html"], ids=["an ending", "a place"])
def test_where_nothing_can_be_written_it_says_so(trained: Path, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("in the way")
    assert main(["report", str(trained), "--out", out]) == 2
    assert out.partition("/")[0] in capsys.readouterr().err


@pytest.mark.medium
def test_runs_of_other_models_beside_it_are_passed_over(trained: Path) -> None:
    class Other(Nested):
        """Another class."""

    for model in (Other(), Nested()):
        make_trainer(None, logger=CSVLogger("logs")).fit(model, vectors(60))
    first, second = (json.dumps(read_record(Path(f"logs/lightning_logs/version_{n}")).header.model) for n in (0, 1))
    assert first != second
    assert main(["report", "logs/lightning_logs/version_1", "--out", "report.json"]) == 0
    assert json.loads(Path("report.json").read_text())["outcomes"] == []
