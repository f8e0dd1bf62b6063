"""What each technique has contributed, losers included: from reports of which all is known, and from a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from lightning_accel import AccelPlugin
from lightning_accel.core.measured import Measurement
from lightning_accel.evidence import tables
from lightning_accel.evidence.events import PlanHeld, TrialDecided
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.evidence.render import to_html, to_json, to_markdown
from lightning_accel.evidence.report_model import Page, page_of
from lightning_accel.evidence.technique_summary import Tried
from support.lightning_models import Supervised, Transformer, tokens
from support.reported_runs import MIB, decided, make_trainer, record_of, told

FUSED = {"on": True, "status": "in force", "applied": {"attention": "fused"}}


def tried(name: str, *results: TrialDecided, held: Any = (), **one: Any) -> Tried:
    """What a page says of a technique of a run with these live trials."""
    return page(*results, held=held, techniques={name: one}).techniques[0]


def page(*results: TrialDecided, held: Any = (), techniques: dict[str, Any]) -> Page:
    plan = PlanHeld(choices=dict.fromkeys(held, "on"), is_settled=True)
    return page_of(record_of(**told(**techniques), trials={one.name: one for one in results}, held=plan))


WON = decided("flash_attention", "faster", (1.3, 1.2, 1.4), (), ("flash_attention",), [1000 * MIB, 600 * MIB])


# -- what came of it -----------------------------------------------------------------------------------------------


def test_what_has_won_on_whole_steps_is_kept_with_ratio_interval_memory_and_steps() -> None:
    one = tried("flash_attention", WON, held=["flash_attention"], **FUSED)
    assert (one.came_of_it, one.why) == ("kept", "faster")
    assert one.trial is not None
    assert (one.trial.ratio, one.trial.low, one.trial.high, one.trial.steps) == (1.3, 1.2, 1.4, 24)
    assert (one.trial.peak_bytes_without, one.trial.peak_bytes_with) == (1000 * MIB, 600 * MIB)


def test_what_has_lost_on_whole_steps_is_undone_and_its_figures_stay() -> None:
    lost = decided("flash_attention", "needs more memory", (1.02, 0.9, 1.1), (), ("flash_attention",))
    one = tried("flash_attention", lost, **FUSED)
    assert (one.came_of_it, one.why) == ("undone", "needs more memory")
    assert one.trial is not None
    assert one.trial.ratio == 1.02


def test_what_has_won_and_was_taken_back_by_the_audit_says_so() -> None:
    one = tried("flash_attention", WON, **FUSED)
    assert (one.came_of_it, one.why) == (
        "undone",
        "faster by itself; what held with it was then not faster than plain for sure",
    )


def test_what_was_only_tried_together_with_others_has_no_ratio_of_its_own() -> None:
    whole = decided("whole plan", "not faster", (0.9, 0.8, 1.0), (), ("flash_attention", "precision"))
    one = tried("flash_attention", whole, **FUSED)
    assert (one.came_of_it, one.trial) == ("undone", None)
    assert one.why == "together with others: not faster; not asked by itself"


def test_the_whole_plan_of_one_technique_is_its_own_trial() -> None:
    whole = decided("whole plan", "faster", (1.5, 1.4, 1.6), (), ("flash_attention",))
    one = tried("flash_attention", whole, held=["flash_attention"], **FUSED)
    assert one.trial is not None
    assert one.trial.ratio == 1.5


def test_what_could_not_be_set_up_for_its_turns_is_refused() -> None:
    refused = decided("compile", "refused in its trial", (1.0, 0.0, "inf"), (), ("compile",))
    one = tried("compile", refused, status="left alone", refused={"block": "other numbers"}, waits_for_trials=True)
    assert (one.came_of_it, one.why) == ("refused", "other numbers")


def test_of_several_choices_the_one_that_was_judged_last_is_named() -> None:
    first = decided("optimizer", "cannot tell", (0.9, 0.5, 1.5), (), ("optimizer",))
    second = decided("optimizer=foreach", "not faster", (1.0, 0.9, 1.1), (), ("optimizer",))
    one = tried("optimizer", first, second, **FUSED)
    assert (one.came_of_it, one.why) == ("undone", "optimizer=foreach: not faster")


def test_a_run_without_it_against_one_with_it_is_read_the_other_way_round() -> None:
    """As live trials ask of what saves memory: whether the run is faster without."""
    without = decided("without loss", "not faster", (0.8, 0.5, "inf"), ("loss",), (), [600 * MIB, 1000 * MIB])
    one = tried("loss", without, held=["loss"], **FUSED)
    assert (one.came_of_it, one.why) == ("kept", "without it: not faster")
    assert one.trial is not None
    assert (one.trial.ratio, one.trial.low, one.trial.high) == (1.25, 0.0, 2.0)
    assert (one.trial.peak_bytes_without, one.trial.peak_bytes_with) == (1000 * MIB, 600 * MIB)


@pytest.mark.parametrize(
    ("record", "came_of_it", "why"),
    [
        (FUSED, "kept", "in force"),
        ({"status": "off", "state": "off"}, "not asked", "off"),
        ({"status": "left alone", "refused": {"a": "other numbers"}}, "refused", "other numbers"),
        ({"status": "no site in this model"}, "refused", "no site in this model"),
        ({"status": "x", "refused": {"a": "failed in mid-run"}, "was_in_force": True}, "undone", "failed in mid-run"),
        ({"status": "taken back: a step raised", "state": "reverted"}, "undone", "taken back: a step raised"),
        ({"status": "off, as settled", "rests": True, "refused": {"a": "b"}}, "undone", "off, as settled"),
        ({"on": True, "status": "too dear", "applied": {"a": "b"}, "waits_for_trials": True}, "not asked", "too dear"),
    ],
)
def test_what_no_live_trial_was_about_says_what_came_of_its_sites(
    record: dict[str, Any], came_of_it: str, why: str
) -> None:
    one = tried("flash_attention", **record)
    assert (one.came_of_it, one.why, one.trial) == (came_of_it, why, None)


def test_numbers_are_told_against_the_spread() -> None:
    measured = Measurement(error=2e-6, spread=1e-6, is_same=False, original_ms=4.0, candidate_ms=2.0)
    one = tried("flash_attention", **FUSED, measured=measured.to_dict())
    assert (one.measured, one.error_spreads) == (measured, pytest.approx(2.0))


# -- shown ---------------------------------------------------------------------------------------------------------


def everything() -> Page:
    same = Measurement(error=0.0, spread=1e-6, is_same=True)
    off = {"error": "inf", "spread": 1e-6, "is_same": False}  # as JSON has it
    sparse = Measurement(original_bytes=8 * MIB, candidate_bytes=2 * MIB)
    return page(
        WON,
        held=["flash_attention"],
        techniques={
            "flash_attention": {**FUSED, "measured": Measurement(original_ms=4.0, candidate_ms=2.0).to_dict()},
            "gradient_checkpointing": {**FUSED, "measured": same.to_dict()},
            "compile": {"status": "x", "refused": {"a": "other numbers"}, "measured": off},
            "sparse_activations": {**FUSED, "measured": sparse.to_dict()},
            "float8": {},
        },
    )


def test_each_has_a_row_with_its_figures_in_columns() -> None:
    table = tables.of(everything())["techniques"]
    rows = {row[0][0]: dict(zip(table.heads, [text for text, _ in row], strict=True)) for row in table.rows}
    assert list(rows) == ["flash_attention", "gradient_checkpointing", "compile", "sparse_activations"]
    won = rows["flash_attention"]
    assert (won["result"], won["speed of whole steps"]) == ("kept", "1.30x [1.20, 1.40]")
    assert (won["judged on"], won["peak memory"]) == ("24 steps", "0.60x (−400.0 MiB)")
    assert won["speed of what it replaces"] == "2.00x"
    assert rows["gradient_checkpointing"]["error beside rounding"] == "the same to the bit"
    assert rows["gradient_checkpointing"]["judged on"] == "first batch"
    lost = rows["compile"]
    assert (lost["result"], lost["error beside rounding"], lost["why"]) == ("refused", "not a number", "other numbers")
    assert rows["sparse_activations"]["memory of what it replaces"] == "0.25x"


def test_it_is_sorted_by_numbers_where_they_are_numbers() -> None:
    table = tables.of(everything())["techniques"]
    column = table.heads.index("error beside rounding")
    assert table.numeric[column]
    assert [row[column][1] for row in table.rows][1] == 0.0


def test_html_markdown_and_json_say_the_same() -> None:
    shown = everything()
    for form in (to_html(shown), to_markdown(shown)):
        assert all(
            text in form for text in ("1.30x [1.20, 1.40]", "0.60x (−400.0 MiB)", "the same to the bit", "24 steps")
        )
    read = TypeAdapter(Page).validate_json(to_json(shown))
    assert [one.came_of_it for one in read.techniques] == [one.came_of_it for one in shown.techniques]
    assert read.techniques[0].trial == shown.techniques[0].trial


def test_a_run_of_which_nothing_was_measured_has_no_such_columns() -> None:
    found = tables.of(page(techniques={"loss": FUSED, "compile": FUSED}))["techniques"]
    assert found.heads == ["technique", "result", "why"]
    assert [name for (name, _), *_ in found.rows] == ["loss, compile"]  # for one reason, which stands once


# -- a run ---------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_run_come_to_its_page(tmp_path: Path) -> None:
    """Of trials on the first batch: recomputing gives the same to the bit, fused attention is within the spread."""
    plugin = AccelPlugin(precision="32-true", memory={"checkpoint": "full"}, techniques={"flash_attention": "sdpa"})
    make_trainer(tmp_path, plugin).fit(Supervised(Transformer()), tokens())
    said = {one.name: one for one in page_of(read_record(tmp_path)).techniques}
    recomputed, fused = said["gradient_checkpointing"], said["flash_attention"]
    assert (recomputed.came_of_it, recomputed.error_spreads) == ("kept", 0.0)
    assert recomputed.measured is not None
    assert recomputed.measured.is_same
    assert fused.came_of_it == "kept"
    assert fused.error_spreads is not None
    assert 0 <= fused.error_spreads <= 4
