"""What a search has found out, for a second one to go on from."""

from __future__ import annotations

from typing import Any

from lightning_accel.experiment.pair_test import RatioInterval
from lightning_accel.search.job import TrialSetup, TuneJob
from lightning_accel.search.judging import Facts, Objective
from lightning_accel.search.search_cache import SEARCHES, Answers, answers_for
from lightning_accel.tuning.comparison import Result
from support.search_runs import Broken, Sleeper, loader, trainer

FACTS = Facts(1.0, 0.01, 0.0, 1 << 30, 1 << 29, 8, 4)
WON = Result("batch_size=16", "faster", RatioInterval(1.5, 1.2, 1.9), 40)
KEY = {"model": "Net"}
LARGER = TrialSetup(batch_size=16, plan={"compile": "on"})


def test_what_was_answered_is_there_for_a_second_search() -> None:
    answers = Answers(KEY)
    answers.facts[LARGER.key] = FACTS
    answers.add(TrialSetup(), LARGER, WON)
    again = Answers(KEY)
    assert again.result(TrialSetup(), LARGER) == WON
    assert again.facts == {LARGER.key: FACTS}
    assert again.result(LARGER, TrialSetup()) is None


def test_a_damaged_file_is_left_and_said() -> None:
    SEARCHES.put(KEY, {"seconds": 9, "facts": {"a": {}}})
    answers = Answers(KEY)
    assert answers.result(TrialSetup(), LARGER) is None
    assert answers.facts == {}
    assert ".json is damaged" in answers.complaint


def test_another_model_batch_machine_or_aim_is_another_search() -> None:
    def stored(
        batch_size: int = 8,
        host: str = "a CPU",
        objective: Objective = "speed",
        limit: int | None = None,
        model: type[Sleeper] = Sleeper,
        **options: Any,
    ) -> int:
        job = TuneJob.of(model(), loader(batch_size), trainer(**options))
        answers_for(job, host, objective, limit, 60.0).add(TrialSetup(), LARGER, WON)
        return len(list(SEARCHES.paths()))

    assert stored() == 1
    assert stored() == 1
    assert stored(batch_size=4) == 2
    assert stored(host="another CPU") == 3
    assert stored(objective="memory") == 4
    assert stored(limit=1 << 30) == 5
    assert stored(max_epochs=1) == 6  # in which a compiler has to win back its time
    assert stored(model=Broken) == 7
    assert SEARCHES.clear() == 7


def test_what_could_not_be_told_is_asked_again_by_a_longer_search() -> None:
    unsure = Result("batch_size=16", "cannot tell", RatioInterval(1.1, 0.9, 1.3), 40)
    Answers(KEY, seconds=60).add(TrialSetup(), LARGER, unsure)
    assert Answers(KEY, seconds=30).result(TrialSetup(), LARGER) == unsure
    assert Answers(KEY, seconds=600).result(TrialSetup(), LARGER) is None


def test_answers_of_another_run_can_be_forgotten() -> None:
    answers = Answers()
    answers.facts[LARGER.key] = FACTS
    answers.add(TrialSetup(), LARGER, WON)
    answers.forget()
    assert answers.result(TrialSetup(), LARGER) is None
    assert not answers.facts
