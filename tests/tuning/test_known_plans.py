"""Runs that begin with what an earlier one has settled: what is proven stays unless it is refuted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_accel.tuning.tuning_result import WHOLE, Tuning
from support.simulated_machine import SimulatedRun


def remembered(speedup: float = 1.31) -> Tuning:
    """A plan of one arm that an earlier run has shown to be faster."""
    tuning = SimulatedRun({"attention": speedup}, 100).run()
    assert tuning.is_proven
    return replace(tuning, is_earlier=True)


def audited_in_vain() -> Tuning:
    """What a short run on a noisy machine makes of it: its audit cannot tell."""
    tuning = SimulatedRun({"attention": 1.31}, 70, noise=0.2).run(known=remembered())
    assert tuning.results["audit"].verdict == "cannot tell"
    return tuning


def test_what_was_settled_by_an_earlier_run_is_not_tried_again() -> None:
    known = SimulatedRun({"attention": 1.5, "layout": 0.9}).run()
    again = SimulatedRun({"attention": 1.5, "layout": 0.9}, 90)
    again.run(known=known, is_trusted=True)
    assert again.switches == [("layout", "off")]


def test_what_an_earlier_run_has_settled_is_audited_in_a_longer_one() -> None:
    slower_now = SimulatedRun({"attention": 0.9})
    assert slower_now.run(known=remembered(1.5)).choices == {}


def test_a_run_that_begins_again_asks_what_it_did_not_have_and_audits_nothing() -> None:
    known = SimulatedRun({"attention": 1.5}).run()
    again = SimulatedRun({"attention": 1.5, "layout": 1.3})
    tuning = again.run(known=known)
    assert tuning.choices == {"attention": "on", "layout": "on"}
    assert "audit" not in tuning.results
    assert all(name == "layout" for name, _ in again.switches[:10])


def test_a_run_that_begins_again_before_it_has_settled_asks_for_what_is_new_first_and_then_for_the_rest() -> None:
    whole = SimulatedRun({"attention": 1.5, "layout": 0.9}).run().results[WHOLE]
    known = Tuning(dict(whole.candidate), {WHOLE: whole}, whole)
    tuning = SimulatedRun({"attention": 1.5, "layout": 0.9, "fused": 1.2}).run(known=known)
    assert tuning.choices == {"attention": "on", "fused": "on"}
    assert [*tuning.results] == [WHOLE, "fused", "attention", "layout", "audit"]
    assert tuning.is_proven_as_a_whole


def test_what_has_won_its_own_comparison_is_proven_without_an_audit_of_the_plan() -> None:
    before = SimulatedRun({"attention": 1.5}).run()
    later = SimulatedRun({"attention": 1.5, "layout": 1.3}).run()
    unaudited = replace(later, whole=before.whole)
    assert not unaudited.is_proven_as_a_whole
    assert unaudited.gain_of("layout") == pytest.approx(1.3, rel=0.1)
    without = replace(unaudited, results={WHOLE: unaudited.results[WHOLE]})
    assert without.gain_of("layout") == 1.0
    assert later.gain_of("attention") == pytest.approx(1.5, rel=0.1)
    assert later.gain_of("fused") == 1.0  # of which nothing is known


def test_a_proven_plan_stays_where_a_short_run_cannot_tell() -> None:
    runs = [SimulatedRun({"attention": 1.31}, 70, noise=0.2, seed=seed) for seed in range(20)]
    audited = [run.run(known=remembered()) for run in runs]
    kept = {tuning.results["audit"].verdict for tuning in audited if tuning.choices}
    assert kept == {"faster", "cannot tell"}
    assert all(one.choices for one in audited if one.results["audit"].verdict == "cannot tell")


def test_its_line_says_that_the_proof_is_an_earlier_runs() -> None:
    proof, tuning = remembered().whole, audited_in_vain()
    assert proof is not None
    assert tuning.line() == f"{proof.interval} over plain, on {proof.turns} steps of an earlier run"


def test_its_proof_is_not_lost_by_an_audit_that_cannot_tell() -> None:
    proof, tuning = remembered().whole, audited_in_vain()
    assert tuning.whole == proof
    assert tuning.results["whole plan"] == proof
    assert tuning.is_earlier


def test_a_win_in_the_audit_is_the_new_proof() -> None:
    tuning = SimulatedRun({"attention": 1.2}).run(known=remembered(1.5))
    assert tuning.whole is not None
    assert tuning.whole.interval.low <= 1.2 <= tuning.whole.interval.high
    assert tuning.line() == f"{tuning.whole.interval} over plain, on {tuning.whole.turns} of your own steps"
    assert not tuning.is_earlier


@pytest.mark.parametrize("speedup", [0.3, 0.7, 0.9])
def test_a_proven_plan_that_is_slower_now_goes_in_a_short_run_too(speedup: float) -> None:
    tuning = SimulatedRun({"attention": speedup}, 70).run(known=remembered())
    assert tuning.choices == {}
    assert not tuning.is_earlier
    assert tuning.line() == "none of the options on trial was measurably faster; running without them"


def test_a_proven_plan_that_raises_now_goes() -> None:
    run = SimulatedRun({"attention": 1.31}, 70)
    trials = run.trials(known=remembered())
    for turn in range(run.turns):
        trials.begin()
        if run.now["attention"] == "on":
            trials.failed("out of memory")
        trials.took(run.step(turn))
    assert trials.tuning.choices == {}
    assert trials.tuning.results["audit"].verdict == "out of memory"


def test_a_plan_that_nobody_has_proven_goes_where_the_audit_cannot_tell() -> None:
    known = remembered()
    assert known.whole is not None
    known.whole = replace(known.whole, verdict="cannot tell")
    assert SimulatedRun({"attention": 1.31}, 70, noise=0.2).run(known=known).choices == {}


def test_nothing_counts_as_settled_while_the_audit_goes_on() -> None:
    """Else a checkpoint of that moment would have a resumed run trust what was never confirmed."""
    run = SimulatedRun({"attention": 1.31}, 70)
    trials = run.trials(known=remembered())
    for turn in range(6):
        trials.begin()
        trials.took(run.step(turn))
    assert not trials.tuning.is_settled


def test_a_proven_plan_is_not_audited_where_no_audit_could_end() -> None:
    """Of a dear switch: fourteen pairs take longer than the run."""
    known = remembered()
    run = SimulatedRun({"attention": 1.31}, 70, settle={"attention": 2})
    tuning = run.run(known=known)
    assert run.switches == []
    assert tuning.line().endswith("steps of an earlier run")
