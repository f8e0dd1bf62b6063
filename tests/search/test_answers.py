"""What a search has found out, for a second one to go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_accel.search.answers import Answers, answers_for
from lightning_accel.search.job import Job
from lightning_accel.search.judging import Facts
from lightning_accel.search.setup import Setup
from lightning_accel.tuning import remembered
from lightning_accel.tuning.comparison import Result
from lightning_accel.tuning.pairs import Interval
from support.search_runs import Sleeper, loader, trainer

FACTS = Facts(1.0, 0.01, 0.0, 1 << 30, 1 << 29, 8, 4)
WON = Result("batch_size=16", "faster", Interval(1.5, 1.2, 1.9), 40)
LARGER = Setup(batch_size=16, plan={"compile": "on"})


def test_what_was_answered_is_there_for_a_second_search() -> None:
    answers = Answers(Path("found") / "one.json")
    answers.facts[LARGER.key] = FACTS
    answers.add(Setup(), LARGER, WON)
    again = Answers(Path("found") / "one.json")
    assert again.result(Setup(), LARGER) == WON
    assert again.facts == {LARGER.key: FACTS}
    assert again.result(LARGER, Setup()) is None


@pytest.mark.parametrize("content", ["", "{", "null", '{"format": 99}', '{"format": 1, "facts": {"a": {}}}'])
def test_a_damaged_file_is_left_and_said(content: str) -> None:
    Path("one.json").write_text(content)
    answers = Answers(Path("one.json"))
    assert len(answers) == 0
    assert "one.json is damaged" in answers.complaint


def test_another_model_batch_machine_or_aim_is_another_search() -> None:
    def stored(batch_size: int = 8, host: str = "a CPU", objective: str = "speed", step_s: float = 0.1) -> list[str]:
        job = Job.of(Sleeper(step_s), loader(batch_size), trainer())
        answers_for(job, host, objective).add(Setup(), LARGER, WON)  # type: ignore[arg-type]
        return [path.name for path in remembered.searches().glob("*.json")]

    assert len(stored()) == 1
    assert len(stored()) == 1
    assert len(stored(batch_size=4)) == 2
    assert len(stored(host="another CPU")) == 3
    assert len(stored(objective="memory")) == 4
    assert remembered.clear() == 4
