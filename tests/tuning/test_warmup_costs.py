"""Arms that have to be set up first, on a simulated machine: asked last, where the run can afford it, and only then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_accel.tuning.trials import LiveTrials
from lightning_accel.tuning.tuning_result import Tuning
from support.simulated_machine import SimulatedRun


class Compiler:
    """A setup that takes ``takes_s`` of the turn that it is begun before; ``None``: nothing comes of it."""

    def __init__(self, expected_s: float, takes_s: float | None = None) -> None:
        self.expected, self.takes_s = expected_s, takes_s
        self.log: list[str] = []

    def expected_s(self) -> float:
        return self.expected

    def begin(self, may_take_s: float) -> None:
        self.log.append(f"begun, may take {may_take_s:.1f} s")

    def end(self) -> float | None:
        self.log.append("ended")
        return self.takes_s

    def decline(self, reason: str) -> None:
        self.log.append(reason)


class CompiledRun(SimulatedRun):
    """A run of steps of 0.1 s, one arm of which has to be compiled, and another that has not."""

    def __init__(self, compiler: Compiler, turns: int = 1000, *, compiled: float = 1.5, layout: float = 1.0) -> None:
        super().__init__({"compile": compiled, "layout": layout}, turns)
        self.arms = [replace(self.arms[0], setup=compiler), self.arms[1]]
        self.now["compile"] = "off"
        self.compiler = compiler
        self.seen: list[bool] = []

    def run(self, **settings: object) -> Tuning:
        trials: LiveTrials = self.trials(**settings)
        for turn in range(self.turns):
            begun = len(self.compiler.log)
            trials.begin()
            is_compiling = any("begun" in line for line in self.compiler.log[begun:])
            trials.took(self.step(turn) + is_compiling * (self.compiler.takes_s or 0.0))
            self.seen.append(self.now["compile"] == "on")
        return trials.tuning


def test_it_is_off_until_it_is_asked_for_after_the_others() -> None:
    run = CompiledRun(Compiler(1.0, 1.0))
    tuning = run.run()
    assert list(tuning.results)[:1] + list(tuning.results)[-2:] == ["whole plan", "compile", "audit"]
    assert not any(run.seen[:28])
    assert tuning.choices == {"compile": "on"}


def test_it_is_set_up_once_however_often_it_is_switched() -> None:
    run = CompiledRun(Compiler(1.0, 1.0))
    run.run()
    assert [line.split(",")[0] for line in run.compiler.log] == ["begun", "ended"]
    assert run.switches.count(("compile", "on")) > 5


def test_a_run_that_cannot_afford_it_never_begins_and_says_why() -> None:
    run = CompiledRun(Compiler(30.0))
    assert run.run().choices == {}
    assert not any(run.seen)
    (reason,) = run.compiler.log
    assert reason.startswith("not tried: it would take about 30 s, and trials may cost this run ")


def test_a_longer_run_can() -> None:
    run = CompiledRun(Compiler(30.0, 30.0), 20_000)
    assert run.run().choices == {"compile": "on"}


def test_the_step_that_sets_up_does_not_count() -> None:
    """It took two minutes, against what was expected: that is spent, and says nothing of the steps to come."""
    tuning = CompiledRun(Compiler(1.0, 120.0)).run()
    assert tuning.choices == {"compile": "on"}
    assert tuning.results["compile"].verdict == "faster"


def test_the_table_says_what_it_cost_and_when_it_has_paid() -> None:
    tuning = CompiledRun(Compiler(1.0, 1.2)).run()
    turns = tuning.pays_after("compile")
    assert turns is not None
    assert 1.2 / 0.05 < turns < 1.2 / 0.02  # it wins a third of 0.1 s a step
    assert f"; 1.2 s to set up: pays after {turns} steps" in tuning.table()


def test_where_nothing_comes_of_it_the_arm_has_lost() -> None:
    run = CompiledRun(Compiler(1.0, None), layout=1.3)
    tuning = run.run()
    assert tuning.results["compile"].verdict == "refused in its trial"
    assert tuning.choices == {"layout": "on"}


def test_alone_it_is_compared_with_the_plain_run() -> None:
    run = CompiledRun(Compiler(1.0, 1.0))
    run.arms = run.arms[:1]
    tuning = run.run()
    assert tuning.choices == {"compile": "on"}
    assert tuning.is_proven


def test_alone_and_slower_the_run_is_the_users_own() -> None:
    run = CompiledRun(Compiler(1.0, 1.0), compiled=0.8)
    run.arms = run.arms[:1]
    tuning = run.run()
    assert tuning.choices == {}
    assert tuning.line() == "none of the options on trial was measurably faster; running without them"


# -- several choices of it ---


class TwoChoices(CompiledRun):
    """The compiled run can also be had with graphs, whose switches take two turns; ``has``: whether it really can."""

    def __init__(self, compiler: Compiler, *, graphs: float, has: bool = True, compiled: float = 1.5) -> None:
        super().__init__(compiler, 2000)
        self.speedups["compile"] = {"on": compiled, "graphs": graphs}
        choices = ("on", "graphs")
        self.arms[0] = replace(
            self.arms[0], choices=choices, settle_of={"graphs": 2}, has=lambda choice: choice == "on" or has
        )


def test_a_second_choice_is_compared_with_the_first_and_set_up_with_it() -> None:
    run = TwoChoices(Compiler(1.0, 1.0), graphs=2.2)
    assert run.run().choices == {"compile": "graphs"}
    assert [line.split(",")[0] for line in run.compiler.log] == ["begun", "ended"]


def test_what_it_gains_adds_to_what_the_first_has_gained() -> None:
    tuning = TwoChoices(Compiler(1.0, 1.0), graphs=2.2).run()
    assert tuning.gain_s["compile"] == pytest.approx(0.1 - 0.1 / 2.2, rel=0.15)


def test_it_can_win_where_the_first_has_not() -> None:
    tuning = TwoChoices(Compiler(1.0, 1.0), graphs=2.2, compiled=0.97).run()
    assert tuning.choices == {"compile": "graphs"}
    assert tuning.gain_s["compile"] == pytest.approx(0.1 - 0.1 / 2.2, rel=0.15)


def test_a_choice_that_the_setup_found_impossible_is_not_asked_for() -> None:
    run = TwoChoices(Compiler(1.0, 1.0), graphs=2.2, has=False)
    assert run.run().choices == {"compile": "on"}
    assert ("compile", "graphs") not in run.switches


def test_where_nothing_came_of_the_setup_no_choice_is_asked_for_again() -> None:
    run = TwoChoices(Compiler(1.0, None), graphs=2.2)
    tuning = run.run()
    assert tuning.choices == {}
    assert "compile=graphs" not in tuning.results


def test_turns_after_a_switch_to_a_dear_choice_are_not_counted() -> None:
    """They are so slow that the choice would lose by them."""
    run = TwoChoices(Compiler(1.0, 1.0), graphs=2.2)
    since = [0]

    def slow_after_switch(turn: int) -> float:
        is_new = bool(run.switches) and run.switches[-1] == ("compile", "graphs") and since[0] != len(run.switches)
        since[0] = len(run.switches)
        return 5.0 if is_new else 1.0

    run.slowdown = slow_after_switch
    assert run.run().results["compile=graphs"].interval.ratio == pytest.approx(2.2 / 1.5, rel=0.1)


# -- a second run --------------------------------------------------------------------------------------------------


def settled() -> Tuning:
    tuning = CompiledRun(Compiler(1.0, 1.0), layout=1.3).run()
    assert tuning.choices == {"compile": "on", "layout": "on"}
    return Tuning.from_dict(replace(tuning, is_earlier=True).to_dict())


def test_a_second_run_begins_with_it_whatever_it_may_cost() -> None:
    run = CompiledRun(Compiler(30.0, 1.0), layout=1.3)
    tuning = run.run(known=settled())
    assert all(run.seen[8:50])
    assert run.compiler.log == ["begun, may take inf s", "ended"]
    assert tuning.choices == {"compile": "on", "layout": "on"}


def test_its_first_fifty_steps_are_not_an_audit() -> None:
    run = CompiledRun(Compiler(1.0, 1.0), layout=1.3)
    run.run(known=settled())
    assert sum(not on for on in run.seen[:50]) <= 3


def test_a_second_run_that_is_over_before_it_has_paid_does_without() -> None:
    known = replace(settled(), setup_s={"compile": 100.0})
    run = CompiledRun(Compiler(1.0), 300, layout=1.3)
    tuning = run.run(known=known)
    assert not any(run.seen)
    assert run.compiler.log[0].startswith("not here: it pays after ")
    assert tuning.choices == {"layout": "on"}


def test_what_a_short_run_could_not_afford_a_longer_one_asks() -> None:
    short = CompiledRun(Compiler(30.0), layout=1.3)
    known = replace(short.run(), is_earlier=True)
    assert known.choices == {"layout": "on"}
    longer = CompiledRun(Compiler(30.0, 30.0), 20_000, layout=1.3)
    assert longer.run(known=known).choices == {"compile": "on", "layout": "on"}


def test_a_plan_that_is_slower_at_a_first_look_is_audited_at_once() -> None:
    run = CompiledRun(Compiler(1.0, 1.0), layout=0.9, compiled=0.9)
    assert run.run(known=settled()).choices == {}
    assert run.seen[:60].count(False) > 15
