"""What a report says of a run: each of its parts, from records of which all is known."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_accel.evidence.module_tree import MOST
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.report_model import Page, page_of
from support.reported_runs import MIB, PEAKS, make_trainer, record_of, steps, told, tuned, vectors, with_header
from support.reported_runs import Nested as Model

WITH_PLUGIN = {"precision": "auto"}


def tuned_record(*result: Any, **changes: Any) -> Record:
    """Of a run whose live trials have come to something."""
    return with_header(record_of(**told(), **tuned(*result), **changes), settings=WITH_PLUGIN)


# -- the run in a sentence -----------------------------------------------------------------------------------------


def test_a_faster_run_is_said_to_be_with_its_interval_memory_and_profit() -> None:
    slow, fast = steps(1, 20.0), [steps(65 + 64 * place, 10.0) for place in range(2)]
    record = tuned_record(1.5, 1.4, 1.6, {"precision": "bf16-mixed"}, steps=[slow, *fast])
    epochs = [{**record.epochs[0], "peak_memory_mib": 2400.0}]
    plain = record_of(path=Path("runs/plain/accel/1-1.jsonl"), epochs=epochs)
    # Each of the first 64 steps has lost 5 ms to the trials, and each of the others wins 5.
    expected = "1.50x [1.40, 1.60] over plain, 0.50x the memory of plain, from step 127 on in profit"
    assert page_of(record, [plain]).headline == expected
    assert "profit" not in page_of(replace(record, steps=[steps(1, 30.0), *fast])).headline


def test_the_first_line_has_run_model_date_speed_beside_plain_time_saved_and_what_to_do_next() -> None:
    record = tuned_record(1.5, 1.4, 1.6, {"precision": "bf16-mixed"}, path=Path("gpt/version_1/accel/1-1.jsonl"))
    assert page_of(record).facts == {
        "run": "gpt/version_1",
        "model": "Model",
        "started": "2026-11-23 12:00 UTC",
        "speed now": "400 samples/s",
        "plain": "266.7 samples/s",
        "time saved": "320 ms",
        "next": 'AccelPlugin(techniques={"loss": "on"}) would free 425.0 MiB',
    }
    assert page_of(record_of()).facts["plain"] == "this run is plain"
    assert page_of(tuned_record(1.0, 0.9, 1.1, {})).facts["time saved"] == "none"


def test_a_bound_that_is_not_known_is_told_as_such() -> None:
    page = page_of(tuned_record(1.5, 1.0, "inf", {"precision": "bf16-mixed"}))
    assert page.headline.startswith("1.50x (at least 1.00x) over plain")
    assert [trial.high for trial in page.trials] == [None, None]


@pytest.mark.parametrize(
    ("record", "headline"),
    [
        (record_of(), "A run of 64 steps without AccelPlugin: nothing was tried"),
        (with_header(record_of(), settings=WITH_PLUGIN), "A run of 64 steps: nothing was measured against plain"),
        (tuned_record(1.0, 0.9, 1.1, {}), "As fast as plain: no option made its steps measurably faster"),
        (record_of(status="ValueError: no"), "Ended after 64 steps: ValueError: no"),
        (record_of(status="interrupted"), "Ended after 64 steps: interrupted"),
        (record_of(page="CUDA out of memory.\n\nStep 3"), "Out of memory after 64 steps: CUDA out of memory."),
        (record_of(steps=[], epochs=[], anatomy=None), "A run of 0 steps without AccelPlugin: nothing was tried"),
    ],
    ids=["plain", "short", "nothing faster", "failed", "interrupted", "out of memory", "no steps"],
)
def test_the_headline_says_what_became_of_the_run(record: Record, headline: str) -> None:
    assert page_of(record).headline.startswith(headline)


def test_what_trials_have_settled_is_in_the_settings_to_copy() -> None:
    page = page_of(tuned_record(1.5, 1.4, 1.6, {"precision": "bf16-mixed"}, 20))
    assert page.settings == {
        "python": "Trainer(plugins=[AccelPlugin(precision='bf16-mixed')])",
        "yaml": "accel:\n  precision: bf16-mixed",
    }
    assert page.settled_step == 20


def test_what_trials_have_settled_without_is_off_in_the_settings_to_copy() -> None:
    record = record_of(**told(flash_attention={"rests": True}, optimizer={"on": True}), **tuned(0.9, 0.8, 1.0, {}))
    page = page_of(with_header(record, settings=WITH_PLUGIN))
    assert page.settings["python"] == "Trainer(plugins=[AccelPlugin(techniques={'flash_attention': 'off'})])"


def test_a_precision_that_trials_have_switched_off_is_not_told_as_that_of_the_run() -> None:
    def shown(**precision: Any) -> str:
        record = record_of(**told(precision={"on": False, **precision}))
        return page_of(with_header(record, settings=WITH_PLUGIN, precision="bf16-mixed")).machine["precision"]

    assert shown(rests=True) == "32-true, bf16-mixed before it was switched off"
    assert shown(on=True) == "bf16-mixed"


def test_settings_of_another_version_are_shown_and_not_offered() -> None:
    page = page_of(with_header(record_of(), settings={"warp_drive": "on"}))
    assert (page.settings, page.plan) == ({}, {"warp_drive": "on"})


# -- what to do next -----------------------------------------------------------------------------------------------


def waiting(**changes: Any) -> Record:
    return record_of(steps=[steps(1, 10.0, wait_ms=5.0)], **changes)


def test_the_verdict_names_the_next_action_and_what_it_would_bring() -> None:
    page = page_of(waiting())
    assert page.verdict.startswith("Waiting for data takes 50% of a step: DataLoader(..., num_workers=3")
    assert page.verdict.endswith(f"would give about {page.findings[0].speedup:.2g}x.")


def test_memory_that_would_be_freed_is_told_in_bytes() -> None:
    page = page_of(record_of())
    said = "50% of a step's peak are logits and what their loss keeps"
    assert page.verdict == f'{said}: AccelPlugin(techniques={{"loss": "on"}}) would free 425.0 MiB.'


def test_of_a_run_without_memory_the_verdict_is_why_it_could_not_go_on() -> None:
    assert (
        page_of(record_of(page="CUDA out of memory.\n\nStep 3 did not fit\n\nWho asked:")).verdict
        == "Step 3 did not fit"
    )


def test_predictions_of_earlier_runs_are_set_beside_what_came_of_them() -> None:
    before = with_header(waiting(path=Path("runs/version_0/accel/1-1.jsonl")), started="2026-11-22T12:00:00+00:00")
    now = record_of(steps=[steps(1, 5.0, wait_ms=0.1)])
    (outcome,) = [one for one in page_of(now, [before]).outcomes if one.finding.startswith("waiting")]
    assert (outcome.predicted, outcome.ratio) == (page_of(before).findings[0].speedup, pytest.approx(2.0))
    assert outcome.measured == "2.00x [2.00, 2.00]"


def test_runs_of_other_models_are_no_outcome_of_anything() -> None:
    before = with_header(waiting(), started="2026-11-22T12:00:00+00:00", model="theirs.Other")
    assert page_of(record_of(), [before]).outcomes == []


def test_a_damaged_record_beside_it_is_passed_over() -> None:
    before = with_header(waiting(), started="2026-11-22T12:00:00+00:00", loaders=[{"num_workers": "x"}])
    assert page_of(record_of(), [before]).outcomes == []


# -- time ----------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up_to_it_in_the_order_in_which_it_goes_through_them() -> None:
    page = page_of(record_of())
    assert list(page.parts_ms) == ["waiting for data", "forward"]
    assert page.step_ms == sum(page.parts_ms.values()) == pytest.approx(10.0)


def test_a_module_has_what_its_parts_have() -> None:
    model = page_of(record_of()).modules
    assert model is not None
    (a,) = model.parts
    assert [(part.name, part.kind, part.ms) for part in a.parts] == [("b", "Linear", 4.0), ("c", "ReLU", 2.0)]
    assert (a.ms, a.flops, a.held_bytes) == (6.0, 4 * 10**8, 300 * MIB)
    assert (model.ms, model.held_bytes) == (8.0, 800 * MIB)  # its own operations too, and not the optimizer's


def test_of_the_roof_is_the_time_that_the_machine_would_need_at_its_best() -> None:
    model = page_of(record_of(), peaks=PEAKS).modules
    assert model is not None
    b, c = model.parts[0].parts
    assert b.of_the_roof(PEAKS) == pytest.approx(1.0)  # 4e8 FLOPs at 1e11 a second: its 4 ms
    assert c.of_the_roof(PEAKS) == pytest.approx(0.5)  # 1e7 bytes at 1e10 a second: half of its 2 ms


def test_of_thousands_of_modules_those_with_the_most_are_shown_and_the_rest_summed_up() -> None:
    record = huge()
    assert record.anatomy is not None
    model = page_of(record).modules
    assert model is not None
    shown = [node for _, node in model.walk()]
    assert len(shown) <= 2 * MOST  # those that sum up others, too
    assert any(node.name.endswith(" more)") for node in shown)
    assert sum(node.ms for _, node in model.leaves()) == pytest.approx(model.ms)
    assert model.flops == sum(one.flops for one in record.anatomy.modules)
    assert "layers.7.mlp" in dict(model.leaves())


def huge(layers: int = 1000) -> Record:
    """Of a model of three modules a layer, each of which a technique has something else to say of."""
    record = record_of()
    assert record.anatomy is not None
    names = [f"layers.{layer}.{part}" for layer in range(layers) for part in ("attention", "norm", "mlp")]
    one = record.anatomy.modules[1]
    modules = [replace(one, module=name, forward_ms=0.001 * place) for place, name in enumerate(names)]
    modules[names.index("layers.7.mlp")].forward_ms = 500.0
    sites = {name: f"not faster: 0.{place}x" for place, name in enumerate(names)}
    many = [steps(1 + 64 * place, 10.0, losses=[(64 * place + 1, 2.5)]) for place in range(1440)]  # a day
    epochs = [{**record.epochs[0], "epoch": epoch, "steps_per_sec": 0.1 + epoch} for epoch in range(1000)]
    assert record.memory is not None
    return replace(
        record,
        anatomy=replace(record.anatomy, modules=modules),
        memory=replace(record.memory, modules=dict.fromkeys(names, MIB)),
        **told(flash_attention={"refused": sites}, compile={"applied": sites}),
        steps=many,
        epochs=epochs,
    )


# -- memory --------------------------------------------------------------------------------------------------------


def test_categories_add_up_to_the_measured_peak() -> None:
    memory = page_of(record_of()).memory
    assert sum(memory.parts.values()) + memory.beside_bytes == memory.peak_bytes == 1200 * MIB
    assert list(memory.parts.values()) == sorted(memory.parts.values(), reverse=True)
    assert [one.module for one in memory.modules] == ["", "a.b"]


def test_headroom_is_what_the_process_has_left() -> None:
    assert page_of(record_of()).memory.headroom_bytes == (8192 - 1200) * MIB


def test_on_a_gpu_gaps_are_what_the_allocator_has_taken_beyond_the_peak() -> None:
    epochs = [{**record_of().epochs[0], "reserved_mib": reserved} for reserved in (1300.0, 1500.0, None)]
    memory = page_of(record_of(epochs=epochs)).memory
    assert memory.unused_bytes == (1500 - 1200) * MIB
    assert memory.headroom_bytes == (8192 - 1500) * MIB
    assert memory.beside.startswith("workspace within operations")


def test_the_largest_batch_is_what_activations_leave_room_for() -> None:
    # 800 MiB grow with a batch of 4; 200 MiB of the model's and 200 MiB beside do not.
    small = with_header(record_of(), device_bytes=2048 * MIB)
    assert page_of(small).memory.largest_batch == int(4 * (0.95 * 2048 - 400) / 800)


def test_a_batch_of_more_than_four_times_is_not_told_of() -> None:
    assert page_of(record_of()).memory.largest_batch == 4 * 4


def test_without_a_step_that_was_taken_apart_the_peak_is_known_all_the_same() -> None:
    memory = page_of(record_of(anatomy=None, memory=None)).memory
    assert (memory.parts, memory.beside, memory.peak_bytes) == ({}, "", 1200 * MIB)


# -- over the run --------------------------------------------------------------------------------------------------


def test_a_long_run_is_shown_in_few_points_and_epochs() -> None:
    page = page_of(huge())
    assert all(len(points) <= 400 for points in page.curves.values())
    assert page.curves["step, ms"][0][0] == 1
    assert page.curves["step, ms"][-1][0] > 0.99 * 1440 * 64
    assert len(page.epochs) <= 200
    assert page.epochs[-1]["epoch"] == 999


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_losses_that_are_no_numbers_are_said_and_not_drawn(lost: float) -> None:
    page = page_of(record_of(steps=[steps(1, 10.0, losses=[(1, 2.0), (2, lost), (3, lost)])]))
    assert page.curves["loss"] == [(1.0, 2.0)]
    assert any("the loss was no number" in one and "step 2" in one for one in page.remarks)


def test_what_an_epoch_does_not_know_or_has_no_number_for_is_left_out() -> None:
    page = page_of(record_of(epochs=[{"epoch": 0, "peak_memory_mib": 1.0, "mfu": None, "loss_scale": "inf"}]))
    assert page.epochs == [{"epoch": 0.0, "peak_memory_mib": 1.0}]
    assert "loss scale, at the end of each epoch" not in page.curves


def test_a_resumed_run_has_its_loss_scales_at_steps_of_its_own() -> None:
    page = page_of(record_of(steps=[steps(1001, 10.0)], epochs=[{**record_of().epochs[0], "loss_scale": 1024.0}]))
    assert page.curves["loss scale, at the end of each epoch"] == [(1064.0, 1024.0)]


def test_of_several_ranks_an_epoch_says_who_held_up_the_others() -> None:
    stragglers = {"slowest_rank": 1, "step_ms_p95": 12.0, "step_ms_p95_mean": 11.0, "latest_rank": None}
    (epoch,) = page_of(record_of(epochs=[{**record_of().epochs[0], "stragglers": stragglers}])).epochs
    assert (epoch["stragglers_slowest_rank"], epoch["stragglers_step_ms_p95"]) == (1, 12.0)
    assert "stragglers_latest_rank" not in epoch


def test_percentiles_are_over_steps_and_not_over_pieces() -> None:
    assert page_of(
        record_of(steps=[steps(1, 10.0), *(steps(65 + 64 * n, 1.0) for n in range(24))])
    ).step_quantiles_ms == [
        1.0,
        1.0,
        10.0,
    ]


# -- a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Of a plain run, without the plugin."""
    from lightning_accel.evidence.record_reader import read_record

    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, max_epochs=2).fit(Model(), vectors())
    return page_of(read_record(folder), peaks=PEAKS)


def test_a_plain_run_has_a_report_too(run: Page) -> None:
    assert run.headline == "A run of 80 steps without AccelPlugin: nothing was tried"
    assert run.settings["python"] == "Trainer(plugins=[AccelPlugin()])"
    assert (run.trials, run.techniques) == ([], [])


def test_its_step_is_divided_among_its_parts_and_modules(run: Page) -> None:
    assert {"forward", "backward", "optimizer"} <= set(run.parts_ms)
    assert run.modules is not None
    names = {name: node.kind for name, node in run.modules.leaves()}
    assert [kind for name, kind in names.items() if name.startswith("body.")].count("Linear") == 2


def test_its_memory_adds_up_to_the_peak_of_the_process(run: Page) -> None:
    assert sum(run.memory.parts.values()) + run.memory.beside_bytes == run.memory.peak_bytes > 0
    assert "the rest of the process" in run.memory.beside


def test_two_epochs_are_listed(run: Page) -> None:
    assert [epoch["epoch"] for epoch in run.epochs] == [0, 1]
    assert all(epoch["steps_per_sec"] > 0 for epoch in run.epochs)


def test_all_of_it_is_plain_values(run: Page) -> None:
    assert asdict(run)["format"] == 1
