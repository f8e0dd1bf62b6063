"""Live trials on a simulated machine: what they decide, at what price."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.core.purse import Purse
from lightning_accel.techniques.arms import Arm
from lightning_accel.tuning.trial_budget import allowance
from lightning_accel.tuning.trial_scheduler import MIN_TURNS
from lightning_accel.tuning.tuning_result import Tuning
from support.simulated_machine import SimulatedRun


def test_what_makes_the_step_faster_stays_and_what_does_not_goes() -> None:
    run = SimulatedRun({"attention": 1.5, "layout": 0.95, "copies": 1.0})
    tuning = run.run()
    assert tuning.choices == {"attention": "on"}
    assert {name: tuning.results[name].verdict for name in ("attention", "layout")} == {
        "attention": "faster",
        "layout": "not faster",
    }
    assert run.now == {"attention": "on", "layout": "off", "copies": "off"}


def test_the_line_of_the_report_is_a_measurement_of_the_whole_against_plain() -> None:
    tuning = SimulatedRun({"attention": 1.5, "layout": 0.95}).run()
    assert tuning.whole is not None
    assert tuning.whole.interval.low <= 1.5 <= tuning.whole.interval.high
    assert tuning.line() == f"{tuning.whole.interval} over plain, on {tuning.whole.turns} of your own steps"


def test_a_gain_is_found_in_a_plan_that_loses_as_a_whole() -> None:
    tuning = SimulatedRun({"slow": 0.6, "fast": 1.3}).run()
    assert tuning.choices == {"fast": "on"}


@pytest.mark.parametrize("seed", [2, 4, 6])
def test_an_arm_that_seems_to_gain_stays_in_a_plan_that_has_won_and_in_no_other(seed: int) -> None:
    arms = {"copies": 1.04}
    won = SimulatedRun({"attention": 1.3} | arms, turns=300, noise=0.06, seed=seed).run()
    assert won.results["copies"].verdict == "cannot tell"
    assert won.choices == {"attention": "on", "copies": "on"}
    assert won.gain_of("copies") == won.results["copies"].interval.ratio  # not what the plan as a whole gains
    lost = SimulatedRun({"slow": 0.7} | arms, turns=300, noise=0.06, seed=seed).run()
    assert lost.results["copies"].verdict == "cannot tell"
    assert not lost.choices


def test_a_run_with_nothing_that_could_gain_enough_says_so() -> None:
    counted = iter([None, None, 0.0])  # in its first turns nothing is known
    run = SimulatedRun({"copies": 1.01}, asked_alone=True, starts_off=True, gain_ms=lambda: next(counted))
    assert run.run().line() == "nothing was worth trying"


def test_an_arm_that_could_gain_too_little_by_the_trial_of_its_parts_is_not_asked() -> None:
    run = SimulatedRun({"attention": 1.5, "copies": 1.01})
    run.arms[1] = replace(run.arms[1], gain_ms=lambda: 1.0)  # of 100 ms or less
    tuning = run.run()
    assert list(tuning.results) == ["whole plan", "attention"]
    assert tuning.choices == {"attention": "on", "copies": "on"}


@pytest.mark.parametrize(("gain_ms", "asked"), [(50.0, True), (1.0, False)])
def test_an_arm_whose_gain_shows_in_the_plan_that_is_left_waits_for_that(gain_ms: float, asked: bool) -> None:
    run, held = SimulatedRun({"attention": 0.6, "copies": 1.5}), []
    run.now["copies"] = "off"

    def gain() -> float | None:
        held.append(set(run.now.values()))
        return gain_ms if len(held) == 5 else None

    run.arms[1] = replace(run.arms[1], gain_ms=gain, asked_alone=True, starts_off=True)
    assert run.run().choices == ({"copies": "on"} if asked else {})
    assert held[1:] == 4 * [{"off"}]


def test_after_a_plan_that_has_lost_an_arm_that_loses_little_is_asked_first() -> None:
    run = SimulatedRun({"attention": 0.5, "copies": 1.1})
    run.arms[1] = replace(run.arms[1], loses_little=True)
    assert list(run.run().results)[:3] == ["whole plan", "copies", "attention"]


@pytest.mark.parametrize(("speedup", "kept"), [(1.3, {"attention": "on", "threads": "on"}), (0.6, {"attention": "on"})])
def test_what_loses_more_often_than_it_wins_is_no_part_of_the_whole_and_asked_last(
    speedup: float, kept: dict[str, str]
) -> None:
    run = SimulatedRun({"threads": speedup, "attention": 1.5})
    run.arms[0] = replace(run.arms[0], asked_alone=True, starts_off=True)
    tuning = run.run()
    assert list(tuning.results)[:3] == ["whole plan", "attention", "threads"]
    assert tuning.results["whole plan"].verdict == "faster"
    assert tuning.choices == kept


@pytest.mark.parametrize("turns", [100, 1000])
@pytest.mark.parametrize("speedup", [0.3, 0.8])
def test_slow_arms_cost_no_more_than_allowed(turns: int, speedup: float) -> None:
    run = SimulatedRun({"slow": speedup, "another": 1.0}, turns)
    run.run()
    # Over the allowance go the turns by which it is found out: one to get ready and one of a pair.
    assert run.seconds / run.plain_seconds - 1 <= (allowance(turns) + 2 / speedup) / turns


def test_one_hiccup_in_a_turn_of_a_faster_arm_is_not_held_against_it() -> None:
    run = SimulatedRun({"attention": 1.3}, 200)
    hiccups: list[int] = []

    def slowdown(turn: int) -> float:
        if turn >= 8 and run.now["attention"] == "on" and not hiccups:
            hiccups.append(turn)
            return 7.0  # more than half of what may be spent
        return 1.0

    run.slowdown = slowdown
    assert run.run().choices == {"attention": "on"}
    assert len(hiccups) == 1


def begun_busy(speedup: float, *, busy: int = 40, turns: int = 1000, seed: int = 0) -> SimulatedRun:
    """A run whose first turns another process makes longer, by a factor that changes from turn to turn."""
    run = SimulatedRun({"attention": speedup}, turns, seed=seed)
    factors = np.random.default_rng(seed).uniform(1.5, 8, busy)
    run.slowdown = lambda turn: float(factors[turn]) if turn < busy else 1.0
    return run


def in_debt() -> Purse:
    """A purse of a run that has spent more than it may, by trials of parts on a busy machine."""
    purse = Purse()
    purse.steps = 1000
    purse.step_took(0.1)
    purse.pay("trials of parts", 10.0)
    return purse


def test_a_plan_that_was_too_dear_while_the_machine_was_busy_is_tried_again() -> None:
    runs = [begun_busy(2.0, seed=seed) for seed in range(20)]
    kept = [run.run(purse=in_debt()).choices == {"attention": "on"} for run in runs]
    assert sum(kept) >= 19


def test_a_plan_that_is_slower_is_not_tried_again_on_a_machine_that_was_not_busy() -> None:
    run = SimulatedRun({"attention": 0.5})
    tuning = run.run(purse=in_debt())
    assert tuning.results["whole plan"].verdict == "too dear to try on"
    assert run.switches.count(("attention", "on")) <= 2
    assert run.seconds / run.plain_seconds < 1.01


def test_a_plan_that_is_slower_costs_little_though_the_machine_was_busy() -> None:
    run = begun_busy(0.5)
    assert run.run(purse=in_debt()).choices == {}
    quiet_s = 0.1 * (run.turns - 40)
    assert run.seconds - sum(0.1 * run.slowdown(turn) for turn in range(40)) < quiet_s * 1.02


def test_what_raised_an_error_is_no_part_of_the_plan_that_is_tried_again() -> None:
    run = SimulatedRun({"layout": 1.0, "attention": 2.0}, 3000)
    trials = run.trials()
    for turn in range(run.turns):
        trials.begin()
        seconds = run.step(turn)
        is_on = {name for name, choice in run.now.items() if choice == "on"}
        if is_on == {"layout"} and "layout" not in trials.tuning.results:
            trials.failed("raised an error")
        if "attention" not in trials.tuning.results:  # the machine is busy, at one side's expense
            seconds *= 60 if "attention" in is_on else 3
        trials.took(seconds)
    verdicts = {name: result.verdict for name, result in trials.tuning.results.items()}
    assert verdicts == {"whole plan": "faster", "layout": "raised an error", "attention": "too dear to try on"}
    assert trials.tuning.choices == {"attention": "on"}


def test_the_allowance_is_five_percent_of_a_hundred_steps_and_two_of_a_thousand() -> None:
    assert allowance(100) == pytest.approx(5)
    assert allowance(1000) == pytest.approx(20)
    assert allowance(10_000) == pytest.approx(200)


def test_a_short_run_tries_nothing_and_does_what_the_rules_say() -> None:
    run = SimulatedRun({"attention": 0.5}, MIN_TURNS - 1)
    tuning = run.run()
    assert run.switches == []
    assert tuning.choices == {"attention": "on"}
    assert tuning.whole is None


def test_steps_after_a_switch_are_charged_to_the_switch() -> None:
    """A switch of this arm makes the next two steps a quarter longer, and the step itself a fifth faster."""
    run = SimulatedRun({"layout": 1.2}, settle={"layout": 2})
    known, since = [0], [0]

    def slowdown(turn: int) -> float:
        if len(run.switches) != known[0]:
            known[0], since[0] = len(run.switches), turn
        return 1.25 if run.switches and turn - since[0] < 2 else 1.0

    run.slowdown = slowdown
    tuning = run.run()
    assert tuning.choices == {"layout": "on"}
    assert tuning.whole is not None
    assert tuning.whole.interval.ratio == pytest.approx(1.2, rel=0.03)


class SimulatedPeak(PeakMemory):
    """1,000 MiB without an arm, and another number with it."""

    def __init__(self, run: SimulatedRun, arm: str, mebibytes: int) -> None:
        super().__init__(torch.device("cpu"))
        self._run, self._arm, self._mebibytes = run, arm, mebibytes

    def peak_bytes(self) -> int:
        return (self._mebibytes if self._run.now[self._arm] == "on" else 1000) << 20

    def restart(self) -> None: ...


def test_an_arm_that_needs_more_memory_has_to_win_ten_percent() -> None:
    def tuned(speedup: float) -> Tuning:
        run = SimulatedRun({"hungry": speedup})
        return run.run(peak=SimulatedPeak(run, "hungry", 1100))

    assert tuned(1.05).choices == {}
    assert tuned(1.05).results["whole plan"].verdict == "needs more memory"
    assert tuned(1.05).results["whole plan"].peak_bytes == (1000 << 20, 1100 << 20)
    assert tuned(1.3).choices == {"hungry": "on"}


def with_a_saver(speedup: float) -> SimulatedRun:
    run = SimulatedRun({"fast": 1.5, "saver": speedup}, saves_memory=True)
    run.arms[0] = Arm("fast", ("on",), run.chooser("fast"))
    return run


def test_what_saves_memory_stays_unless_the_run_is_slower_with_it() -> None:
    assert with_a_saver(1.0).run().choices == {"fast": "on", "saver": "on"}
    assert with_a_saver(0.9).run().choices == {"fast": "on"}


@pytest.mark.parametrize(("mebibytes", "kept"), [(800, True), (1000, False)])
def test_what_makes_steps_a_little_slower_stays_where_it_does_save_memory(mebibytes: int, kept: bool) -> None:
    run = with_a_saver(0.99)
    tuning = run.run(peak=SimulatedPeak(run, "saver", mebibytes))
    assert tuning.results["without saver"].verdict != "faster"
    assert ("saver" in tuning.choices) == kept


def test_a_plan_that_won_by_chance_goes_once_nearly_the_same_has_lost() -> None:
    """As bfloat16 did, in which float32's own products are slower still: each arm is no loss beside the other."""
    run = SimulatedRun({"format": 1.0, "products": 1.0})

    def slowdown(turn: int) -> float:
        if run.now == {"format": "off", "products": "off"}:
            return 3.0 if turn < 60 else 1.0  # another program computes
        return 1.3 if run.now["format"] == "on" else 1.8

    run.slowdown = slowdown
    tuning = run.run()
    assert tuning.results["whole plan"].verdict == "faster"
    assert tuning.results["audit"].verdict == "not faster"
    assert tuning.choices == {}


def test_out_of_memory_is_a_verdict() -> None:
    run = SimulatedRun({"hungry": 1.5, "other": 1.2})
    trials = run.trials()
    for turn in range(run.turns):
        trials.begin()
        if run.now["hungry"] == "on" and trials.failed("out of memory"):
            assert run.now["hungry"] == "off"
        trials.took(run.step(turn))
    assert trials.tuning.choices == {"other": "on"}
    assert trials.tuning.results["hungry"].verdict == "out of memory"


def test_where_the_run_without_an_arm_runs_out_of_memory_the_arm_stays_and_nothing_is_asked_any_more() -> None:
    """As with half precision, whose arm is what made the batch fit."""
    run = SimulatedRun({"saving": 0.9})
    trials = run.trials()
    failed = 0
    for turn in range(run.turns):
        trials.begin()
        if run.now["saving"] == "off":
            failed += 1
            assert trials.original_failed()
            assert run.now["saving"] == "on"
        trials.took(run.step(turn))
    assert failed == 1
    assert trials.tuning.choices == {"saving": "on"}
    assert run.lines == ["out of memory without saving, so that nothing is tried without any more"]


def test_a_candidate_that_runs_out_of_memory_is_no_failure_of_the_original() -> None:
    run = SimulatedRun({"hungry": 1.5})
    trials = run.trials()
    trials.begin()
    while run.now["hungry"] == "off":
        trials.took(run.step(0))
        trials.begin()
    assert not trials.original_failed()
    assert trials.failed("out of memory")


def test_a_step_that_becomes_longer_has_the_plan_tried_again() -> None:
    """From the 400th step on what was faster is slower: another process has come, say."""
    run = SimulatedRun({"threads": 1.5})
    run.slowdown = lambda turn: 2.5 if turn >= 400 and run.now["threads"] == "on" else 1.0
    tuning = run.run()
    assert tuning.choices == {}
    assert any("a step takes longer than it did" in line for line in run.lines)


def test_a_machine_that_becomes_slower_as_a_whole_costs_no_plan_its_proof() -> None:
    """Two pairs show it mostly; and an audit that cannot tell in what is left of the run refutes nothing."""
    kept, audits = 0, 0
    for seed in range(20):
        run = SimulatedRun({"attention": 1.15}, 800, noise=0.15, seed=seed)
        run.slowdown = lambda turn: 1.5 if turn >= 400 else 1.0
        tuning = run.run()
        kept += tuning.choices == {"attention": "on"}
        audits += any("a step takes longer than it did" in line for line in run.lines)
    assert kept >= 18
    assert 1 <= audits <= 15


def test_a_plan_that_was_proven_with_an_arm_that_is_gone_has_no_proof_of_its_own() -> None:
    """A step with it raised, say. Then an audit that cannot tell keeps nothing."""
    run = SimulatedRun({"attention": 1.5, "copies": 1.2})
    trials = run.trials()
    for turn in range(400):
        trials.begin()
        trials.took(run.step(turn))
    assert trials.tuning.choices == {"attention": "on", "copies": "on"}
    assert trials.tuning.is_proven_as_a_whole
    trials.lose("attention")
    assert trials.tuning.choices == {"copies": "on"}
    assert trials.tuning.is_proven
    assert not trials.tuning.is_proven_as_a_whole


def test_a_plan_that_slowly_loses_its_gain_is_found_by_looks_now_and_then() -> None:
    run = SimulatedRun({"threads": 1.1}, 4000, noise=0.01)
    run.slowdown = lambda turn: 1.18 if turn >= 800 and run.now["threads"] == "on" else 1.0
    assert run.run().choices == {}
    assert any("has become faster" in line for line in run.lines)


def test_a_turn_that_something_came_in_between_does_not_count() -> None:
    run = SimulatedRun({"attention": 1.5}, 400)
    trials = run.trials()
    for turn in range(run.turns):
        trials.begin()
        seconds = run.step(turn)
        trials.took(None if turn % 3 == 0 else seconds)  # a validation
    assert trials.tuning.choices == {"attention": "on"}


def test_times_that_come_late_are_heard_in_their_order() -> None:
    """On a GPU the time of a step is known when the device has passed it, some steps later."""
    run = SimulatedRun({"attention": 1.5, "layout": 0.9}, 400)
    trials, waiting = run.trials(), []
    for turn in range(run.turns):
        trials.begin()
        waiting.append(run.step(turn))
        if len(waiting) == 5:
            for seconds in waiting:
                trials.took(seconds)
            waiting = []
    assert trials.tuning.choices == {"attention": "on"}


def test_a_run_that_has_settled_on_plain_is_left_alone() -> None:
    run = SimulatedRun({"attention": 0.8}, turns=500)
    trials = run.trials()
    for _ in range(400):
        trials.begin()
        trials.took(0.1 if run.now["attention"] == "off" else 0.125)
    assert trials.tuning.choices == {}
    assert trials.is_over


def test_a_plan_that_holds_is_watched_to_the_end() -> None:
    run = SimulatedRun({"attention": 1.5}, turns=500)
    trials = run.trials()
    for _ in range(499):
        trials.begin()
        trials.took(0.15 if run.now["attention"] == "off" else 0.1)
    assert trials.tuning.choices == {"attention": "on"}
    assert not trials.is_over


def test_what_others_delay_in_some_turns_is_not_charged_to_what_is_on_trial() -> None:
    """A callback that draws pictures every few steps, say: the purse would be empty before anything is shown."""
    proven = 0
    for seed in range(20):
        run = SimulatedRun({"attention": 2.5}, 300, seed=seed)
        purse = Purse()
        purse.steps, purse.done = 100_000, 5
        purse.step_took(0.1)
        trials = run.trials(purse=purse)
        for turn in range(300):
            trials.begin()
            trials.took(run.step(turn) + (2.0 if turn % 11 == seed % 11 else 0.0))
            purse.done += 1
        proven += trials.tuning.is_proven
    assert proven >= 18  # 11 where every delay is charged
