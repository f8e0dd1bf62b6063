"""Of steps so short that to time each of them costs too much, some in a row are timed, and then several together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_accel import AccelPlugin
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.settings import Plan
from lightning_accel.tuning.trials import LiveTrials
from support.live_runs import BATCH_SIZE, OTHERS_OFF, Speed, Timed, batches, simulated
from support.measured_runs import Folder

pytestmark = pytest.mark.purse

STEPS = 2_000


class Steps(Callback):
    """Notes, of every step, whether it was timed, and what then stood around the fetch of its batch."""

    def __init__(self) -> None:
        self.were_timed: list[bool] = []
        self.hears_fetches: list[bool] = []
        self.histories: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        added = trainer.precision_plugin._added_logger  # type: ignore[union-attr]
        self.were_timed.append(not added.logger.rests.left)
        self.hears_fetches.append("_on_before_fetch" in vars(trainer.fit_loop.epoch_loop))
        self.histories = added.logger.history


def fit(step_ms: float, steps: int = STEPS, **settings: Any) -> Steps:
    """Trains by a simulated clock, as the user wrote it, with the plugin's own logger."""
    seen = Steps()
    settings.pop("told", []).append(seen)
    with simulated(0.5) as time:  # what is slower is not kept

        class Model(Timed):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.time.advance(step_ms)
                return self.trained(batch)

        accel, callbacks = {**OTHERS_OFF, **settings.pop("accel", {})}, [seen, *settings.pop("others", [])]
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        options: dict[str, Any] = {"max_epochs": 1, "logger": False, "callbacks": callbacks, **quiet, **settings}
        trainer = Trainer(plugins=[AccelPlugin.from_plan(Plan().replace(**accel))], accelerator="cpu", **options)
        trainer.fit(Model(time), batches(steps))
    return seen


@pytest.mark.medium
def test_of_short_steps_few_are_timed() -> None:
    seen = fit(5.0)
    assert sum(seen.were_timed) < 0.2 * STEPS
    assert sum(seen.were_timed[-STEPS // 2 :]) > 20


def test_of_long_ones_all_are() -> None:
    assert all(fit(500.0, 200).were_timed)


def test_a_rest_is_no_longer_than_the_run_so_far() -> None:
    timed = fit(0.5, 40).were_timed
    assert all(timed[:7])
    assert any(timed[10:])


@pytest.mark.medium
def test_nothing_is_told_of_fetches_meanwhile() -> None:
    seen = fit(5.0)
    both = list(zip(seen.hears_fetches, seen.were_timed, strict=True))[STEPS // 2 :]  # live trials are over
    assert both == [(is_timed, is_timed) for _, is_timed in both]


@pytest.mark.medium
def test_all_steps_are_counted() -> None:
    (epoch,) = fit(5.0).histories
    assert epoch.steps == STEPS
    assert epoch.samples == pytest.approx(STEPS * BATCH_SIZE)
    assert epoch.steps_per_sec == pytest.approx(200, rel=0.01)
    assert epoch.step_ms_p50 == pytest.approx(5, rel=0.01)


@pytest.mark.medium
def test_a_pause_in_a_rest_leaves_rates_as_they_are() -> None:
    epochs = fit(5.0, 30, max_epochs=STEPS // 30).histories
    for epoch in (one for one in epochs if one.steps_per_sec is not None):
        assert epoch.steps_per_sec == pytest.approx(200, rel=0.02)
        assert epoch.samples_per_sec == pytest.approx(200 * BATCH_SIZE, rel=0.02)


@pytest.mark.medium
def test_a_step_in_hundred_that_takes_long_counts_as_in_a_run_in_which_each_is_timed() -> None:
    class Pauses(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 100 == 99:
                module.time.advance(1_000)

    (epoch,) = fit(5.0, others=[Pauses()]).histories
    assert epoch.steps_per_sec == pytest.approx(1 / (0.005 + 0.010), rel=0.05)
    assert epoch.step_ms_p50 == pytest.approx(5, rel=0.01)


@pytest.mark.medium
def test_losses_are_kept_of_the_same_steps_however_long_they_take(tmp_path: Path) -> None:
    kept = []
    for step_ms in (10.0, 20.0):
        fit(step_ms, logger=Folder(tmp_path / str(step_ms)))
        kept.append(read_record(tmp_path / str(step_ms)))
    assert [record.num_steps for record in kept] == [STEPS] * 2
    common = set.intersection(*(set(record.losses) for record in kept))
    assert common >= {step for step in kept[0].losses if step % 256 == 0 and step > STEPS // 2}
    assert len(common) > 10


@pytest.mark.medium
@pytest.mark.parametrize("speedup", [1.4, 0.8])
def test_turns_of_live_trials_are_timed_meanwhile(speedup: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logger rests before they begin, and once they have settled: they end their steps themselves."""
    told: list[float | None] = []
    took = LiveTrials.took

    def noted(trials: LiveTrials, seconds: float | None) -> None:
        told.append(seconds)
        took(trials, seconds)

    monkeypatch.setattr(LiveTrials, "took", noted)
    monkeypatch.delattr(Speed, "latest", raising=False)
    seen = Steps()

    class Model(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            is_on = hasattr(Speed, "latest") and Speed.latest.now == "on"  # there is none in the plain beginning
            self.time.advance(10 / (speedup if is_on else 1.0))
            return self.trained(batch)

    with simulated(speedup) as time:
        plugin = AccelPlugin.from_plan(Plan().replace(**OTHERS_OFF))
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = Trainer(plugins=[plugin], accelerator="cpu", max_epochs=1, logger=False, callbacks=[seen], **quiet)
        trainer.fit(Model(time), batches(STEPS))
    assert not all(seen.were_timed[: STEPS // 10])
    assert None not in told
    assert len(told) > (STEPS // 2 if speedup > 1 else 8)
    assert plugin.tuning is not None
    assert plugin.tuning.is_settled
    assert bool(plugin.tuning.choices) == (speedup > 1)
    (epoch,) = seen.histories
    assert epoch.steps == STEPS


@pytest.mark.medium
def test_a_run_that_fails_meanwhile_leaves_a_record_of_all_its_steps(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx > 1_500 and not seen[0].were_timed[-1]:
                raise RuntimeError("its own")

    seen: list[Steps] = []
    with pytest.raises(RuntimeError, match="its own"):
        fit(10.0, logger=Folder(tmp_path), others=[Fails()], told=seen)
    record = read_record(tmp_path)
    assert record.num_steps == len(seen[0].were_timed)
    assert "its own" in record.status


@pytest.mark.medium
def test_whoever_asks_for_a_report_has_all_steps_timed(tmp_path: Path) -> None:
    seen = fit(5.0, 200, accel={"report": str(tmp_path / "report.md")})
    assert all(seen.were_timed)
