"""What mending a fault is predicted to bring: arithmetic on what a record says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_accel.evidence.diagnosis import diagnose
from lightning_accel.evidence.events import PlanHeld
from lightning_accel.evidence.phase_names import BACKWARD, DATA, FORWARD, LOGGING, OPTIMIZER, REST
from lightning_accel.evidence.step_breakdown import BATCH, LOGITS, LayoutCopy, MemoryPeaked, OperationsAlike
from support.made_up_records import PEAKS, PIECES, STEPS, anatomy, found, names, record


def test_of_a_record_without_steps_nothing_is_said() -> None:
    assert diagnose(replace(record(), steps=[])) == []


def test_loading_that_waits_is_hidden_behind_computing() -> None:
    run = record({DATA: 40.0, FORWARD: 59.5})
    assert found(run, "loader").speedup == pytest.approx(99.5 / 60)  # half a millisecond hands a batch over


def test_a_worker_without_a_core_of_its_own_holds_up_a_thread_that_computes() -> None:
    run = record({DATA: 40.0, FORWARD: 59.5}, loading_cpu_ms=20.0, cores=2, threads=2)
    assert found(run, "loader").speedup == pytest.approx(99.5 / (60 + 20))


def test_where_loading_has_no_core_to_go_to_samples_are_to_be_cheaper() -> None:
    run = record({DATA: 40.0, FORWARD: 60.0}, loading_cpu_ms=40.0, samples_ms=30.0, cores=2, threads=2)
    assert found(run, "loader").action.startswith("make a sample cheaper to load")
    assert found(run, "loader").speedup == pytest.approx(100 / 70)


def test_samples_that_would_bring_little_are_left_as_they_are() -> None:
    run = record({DATA: 20.0, FORWARD: 80.0}, loading_cpu_ms=20.0, samples_ms=15.0, cores=2, threads=2)
    assert "loader" not in names(run)


def test_waiting_that_only_steps_that_were_looked_at_have_met_is_none() -> None:
    """A few of all, on which a busy moment of the machine weighs."""
    run = record({DATA: 30.0, FORWARD: 30.0, BACKWARD: 40.0})
    assert "loader" in names(run)
    (some,) = run.steps
    assert "loader" not in names(replace(run, steps=[replace(some, wait_ms=[2.0] * len(some.wait_ms))]))


def test_where_all_workers_are_there_already_none_is_advised() -> None:
    run = record({DATA: 40.0, FORWARD: 60.0}, loaders=[{"num_workers": 3}])
    assert found(run, "loader").speedup is None


@pytest.mark.parametrize(("every", "gain"), [(1, 1 / (1 - 0.4 * 0.98)), (10, 1 / (1 - 0.4 * 0.8))])
def test_logging_less_leaves_what_fifty_steps_need(every: int, gain: float) -> None:
    run = record({FORWARD: 60.0, LOGGING: 40.0}, log_every_n_steps=every)
    assert found(run, "logging").speedup == pytest.approx(gain)


def test_logging_at_lightnings_own_pace_is_none() -> None:
    assert names(record({FORWARD: 60.0, LOGGING: 40.0})) == set()


def test_without_recompiling_all_steps_take_what_those_take_that_capture_nothing() -> None:
    """What is lost is more than the compiler's own account says."""
    step_ms, plain = 100.0, 24
    capturing_ms = step_ms * STEPS - 40.0 * plain
    run = record(
        {FORWARD: step_ms}, captured=168, capturing=STEPS - plain, capturing_ms=capturing_ms, compiling_ms=2000.0
    )
    lost = (capturing_ms - 40.0 * (STEPS - plain)) * 167 / 168  # the first one is needed
    assert found(run, "recompiling").speedup == pytest.approx(step_ms * STEPS / (step_ms * STEPS - lost))


def test_where_every_step_captures_a_graph_the_compilers_time_goes() -> None:
    run = record({FORWARD: 100.0}, captured=100, compiling_ms=0.5 * 100.0 * STEPS)
    assert found(run, "recompiling").speedup == pytest.approx(1 / (1 - 0.5 * 99 / 100))  # the first one is needed


def test_recompiling_that_torch_has_given_up_is_told_too() -> None:
    """It does so after some hundred graphs, and a long run has lines without any."""
    run = record({FORWARD: 100.0}, captured=100, compiling_ms=0.5 * 100.0 * STEPS)
    run.steps.append(replace(run.steps[0], first=STEPS + 1, last=2 * STEPS, captured=0, compiling_ms=0.0))
    finding = found(run, "recompiling")
    assert "goes on" not in finding.says
    assert finding.speedup == pytest.approx(1 / (1 - 0.25 * 99 / 100))


def test_graphs_that_a_resumed_run_captures_at_its_beginning_are_no_recompiling() -> None:
    """Its steps are counted since training began, in an earlier run."""
    run = record({FORWARD: 100.0}, captured=6, compiling_ms=600.0)
    (some,) = run.steps
    first = replace(some, first=10_001, last=10_000 + STEPS)
    rest = replace(some, first=first.last + 1, last=first.last + STEPS, captured=0, compiling_ms=0.0)
    assert "recompiling" not in names(replace(run, steps=[first, rest]))


def test_bfloat16_speeds_up_what_products_take_and_casts_weights() -> None:
    run = record(anatomy=anatomy(product_ms=49.5), native_bf16=True, parameters=10**7)
    casts = 12 * 10**7 / PEAKS.bytes_per_sec / 0.1
    assert found(run, "precision").speedup == pytest.approx(1 / (1 - 0.495 * 0.75 + casts))


def test_a_run_that_has_settled_with_a_precision_is_not_advised_of_it() -> None:
    run = record(anatomy=anatomy(product_ms=49.5), native_bf16=True, parameters=10**7)
    assert "precision" not in names(replace(run, held=PlanHeld(choices={"precision": "bf16-mixed"})))


def test_a_step_that_was_taken_apart_in_a_busy_moment_tells_its_shares_all_the_same() -> None:
    slow = anatomy(product_ms=1000.0, operations_ms=2000.0)
    run = record({DATA: 20.0, FORWARD: 80.0}, anatomy=slow, native_bf16=True)
    assert "take 40% of a step" in found(run, "precision").says


def test_in_a_larger_batch_operations_that_have_much_to_do_take_longer() -> None:
    large = OperationsAlike(count=1, ms=1.5)  # of unknown kind: no operation takes half a millisecond to have
    run = record({FORWARD: 10.0}, anatomy=anatomy(alike=[large], least_ms=0.01))
    assert found(run, "tiny batches").speedup == pytest.approx(8 / (1 + 7 * 0.1))


def test_operations_that_have_next_to_nothing_to_do_take_as_long_in_a_larger_batch() -> None:
    """However long some of them take: that is a busy machine, or what it costs to have them."""
    small = OperationsAlike(count=100, ms=9.0, moved_bytes=2 * 10**6)  # 0.2 ms at the peak, half of which is reached
    run = record({FORWARD: 10.0}, anatomy=anatomy(alike=[small], least_ms=0.01))
    assert found(run, "tiny batches").speedup == pytest.approx(8 / (1 + 7 * 0.04))


@pytest.mark.parametrize(("loader_ms", "grows_ms"), [(3.0, 1.0), (0.5, 0.5)])
def test_in_a_larger_batch_samples_take_longer_to_load_and_the_loader_around_them_does_not(
    loader_ms: float, grows_ms: float
) -> None:
    memory = MemoryPeaked(peak_bytes=1000, parts={BATCH: 0}, modules={})
    run = record(
        {DATA: loader_ms, FORWARD: 10.0 - loader_ms},
        samples_ms=1.0,
        anatomy=anatomy(modules=[], work_ms=0.0),
        memory=memory,
    )
    assert found(run, "tiny batches").speedup == pytest.approx(8 / (1 + 7 * grows_ms / 10))


def test_a_loader_that_does_not_tell_of_samples_is_taken_to_grow_as_a_whole() -> None:
    run = record({DATA: 2.0, FORWARD: 8.0}, anatomy=anatomy(modules=[], work_ms=0.0))
    assert found(run, "tiny batches").speedup == pytest.approx(8 / (1 + 7 * 0.2))


def test_a_batch_of_which_a_third_of_the_step_grows_is_not_called_tiny() -> None:
    run = record({DATA: 3.3, FORWARD: 6.7}, anatomy=anatomy(modules=[], work_ms=0.0))
    assert "tiny batches" not in names(run)


def test_slow_logging_makes_no_batch_tiny() -> None:
    run = record({FORWARD: 10.0, LOGGING: 90.0}, anatomy=anatomy(work_ms=9.0), log_every_n_steps=1)
    assert "tiny batches" not in names(run)


def test_of_copies_of_one_tensor_one_is_left() -> None:
    each = LayoutCopy(module="net", line="", made_by="transpose at train.py:1, in forward", ms=40.0, count=4)
    other = LayoutCopy(module="head", line="train.py:9, in forward", made_by="", ms=9.9, count=1)
    run = record({FORWARD: 100.0}, anatomy=anatomy(copies=[each, other]))
    assert found(run, "layouts").speedup == pytest.approx(1 / (1 - 0.399))


def test_losses_in_pieces_leave_some_of_the_logits() -> None:
    memory = MemoryPeaked(peak_bytes=1000, parts={LOGITS: 600}, modules={})
    assert found(record(memory=memory), "logits").freed_bytes == 510


def test_a_leak_fills_what_there_is() -> None:
    held = [1000.0 + 32.0 * place for place in range(12)]
    one = found(record(held_mib=held, device_bytes=2 * 2**30), "leak")
    assert one.freed_bytes == pytest.approx(2 * STEPS * 2**20)
    assert one.says == "memory grows by 2 MiB a step; 2,048.0 MiB are full after 348 more"


def test_what_fills_gaps_first_makes_a_run_no_larger_than_it_has_grown() -> None:
    held = [1000.0] * 6 + [1000.0 + 32.0 * place for place in range(12)]
    freed_mib = found(record(held_mib=held), "leak").freed_bytes / 2**20
    assert freed_mib == pytest.approx(32 * 11 * 18 / 17)


@pytest.mark.parametrize(
    "held", [[1000.0] * 12, [1000.0 + 50 * (place % 2) for place in range(12)], [500.0, *[1000.0] * 11]]
)
def test_memory_that_does_not_go_on_growing_is_no_leak(held: list[float]) -> None:
    assert "leak" not in names(record(held_mib=held))


_MS = st.floats(0, 1000, allow_nan=False)


@given(
    parts_ms=st.fixed_dictionaries(
        {FORWARD: st.floats(0.1, 1000), **dict.fromkeys((DATA, BACKWARD, OPTIMIZER, LOGGING, REST), _MS)}
    ),
    product_ms=_MS,
    work_ms=_MS,
    copied_ms=_MS,
    cores=st.integers(1, 64),
    workers=st.integers(0, 8),
    every=st.integers(1, 100),
    compiling=st.floats(0, 2),
)
def test_whatever_was_measured_mending_is_never_predicted_to_cost_time(
    parts_ms: dict[str, float],
    product_ms: float,
    work_ms: float,
    copied_ms: float,
    cores: int,
    workers: int,
    every: int,
    compiling: float,
) -> None:
    step_ms = sum(parts_ms.values())
    copy = LayoutCopy(module="", line="", made_by="", ms=copied_ms, count=1)
    taken = anatomy(product_ms=product_ms, work_ms=work_ms, operations_ms=2000.0, copies=[copy])
    run = record(
        parts_ms,
        anatomy=taken,
        captured=PIECES * 8,
        compiling_ms=compiling * step_ms * STEPS,
        native_bf16=True,
        cores=cores,
        threads=cores,
        log_every_n_steps=every,
        loaders=[{"batch_size": 1, "num_workers": workers}],
    )
    gains = [one.speedup for one in diagnose(run, PEAKS) if one.speedup is not None]
    assert gains == sorted(gains, reverse=True)
    assert all(1 <= gain <= 50 for gain in gains)
