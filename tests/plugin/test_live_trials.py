"""Live trials under a Trainer: arms take turns on the run's own steps, whatever kind of run it is."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin
from lightning_accel.experiment.store import STORES, Entry, Store
from lightning_accel.lightning import live_trials
from lightning_accel.settings import Plan
from lightning_accel.tuning.verdict_cache import TUNINGS
from support.live_runs import OTHERS_OFF, Speed, Timed, batches, fit, simulated

pytestmark = pytest.mark.numbers


def status(plugin: AccelPlugin) -> str:
    return plugin.report.of("tuning").status


def quiet_trainer(plugin: AccelPlugin, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(plugins=[plugin], max_epochs=1, **quiet, **options)


def test_what_is_faster_stays_and_the_report_has_the_measurement() -> None:
    with simulated(1.5) as time:
        model = Timed(time)
        plugin = fit(model)
    assert model.seen[-1] == "on"
    assert plugin.report.of("tuning").is_on
    assert "over plain, on" in status(plugin)
    assert "of your own steps" in plugin.report.summary()
    assert "whole plan  faster: 1." in plugin.report.to_text()


def test_what_is_slower_goes() -> None:
    with simulated(0.8) as time:
        model = Timed(time)
        plugin = fit(model)
    assert model.seen[-1] == "off"
    assert status(plugin) == "none of the options on trial was measurably faster; running without them"


def test_what_ways_on_trial_have_left_in_the_heap_goes_back_where_they_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    released_at: list[int] = []
    with simulated(1.5) as time:
        model = Timed(time)
        monkeypatch.setattr(live_trials, "release_free_memory", lambda: released_at.append(len(model.seen)))
        plugin = fit(model)
    (step,) = released_at
    assert plugin.report.of("tuning").data["is_settled"]
    assert {"on", "off"} == set(model.seen[:step])


def test_the_report_says_of_what_has_gone_that_it_is_off() -> None:
    with simulated(0.8) as time:
        plugin = fit(Timed(time))
    assert "  - speed: off, as live trials have settled without it" in plugin.report.summary()
    assert not plugin.report.to_dict()["techniques"]["speed"]["on"]


def test_a_run_that_has_not_settled_has_nothing_that_is_off_for_good() -> None:
    class Stopped(Timed):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = batch_idx == 7

    with simulated(0.8) as time:
        plugin = fit(Stopped(time), 200)
    assert plugin.report.of("speed").acts


@pytest.mark.medium
def test_every_step_of_a_trial_trains() -> None:
    with simulated(1.5) as time:
        model, plain = Timed(time), Timed(time)
        plain.load_state_dict(model.state_dict())
        fit(model)
        fit(plain, accel={"trust": "checked"})
    assert torch.equal(model.layer.weight, plain.layer.weight)
    assert {"on", "off"} == set(model.seen)
    assert len(model.seen) == 200


@pytest.mark.parametrize("settings", [{"accel": {"trust": "checked"}}, {"deterministic": True}])
def test_told_not_to_nothing_is_decided_by_the_clock(settings: dict[str, Any], determinism_restored: None) -> None:
    with simulated(0.5) as time:
        model = Timed(time)
        fit(model, **settings)
        assert Speed.latest.switches == []


@pytest.mark.parametrize("settings", [{"limit_train_batches": 30}, {"max_steps": 20}])
def test_in_a_run_too_short_to_prove_anything_what_is_unproven_goes(settings: dict[str, Any]) -> None:
    with simulated(1.5) as time:
        fit(Timed(time), **settings)
        assert Speed.latest.switches == ["off"]


def test_with_accumulated_gradients_a_turn_ends_with_the_optimizers_step() -> None:
    with simulated(1.5) as time:
        model = Timed(time)
        plugin = fit(model, 400, accumulate_grad_batches=4)
    windows = [set(model.seen[at : at + 4]) for at in range(0, 400, 4)]
    assert all(len(window) == 1 for window in windows)
    assert "over plain" in status(plugin)


def test_accumulation_may_change_in_mid_run() -> None:
    with simulated(1.5) as time:
        model = Timed(time)
        schedule = GradientAccumulationScheduler({0: 1, 1: 2})
        plugin = fit(model, 160, max_epochs=2, callbacks=[schedule])
    assert "over plain" in status(plugin)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_manual_optimization(optimizers: int) -> None:
    with simulated(1.5) as time:
        model = Timed(time, manual=True, optimizers=optimizers)
        plugin = fit(model, 200)
    assert "over plain" in status(plugin)


def test_validation_in_between_is_no_part_of_a_turn() -> None:
    """A validation takes as long as fifty steps: did it count, nothing could be told."""
    with simulated(1.3) as time:
        plugin = fit(Timed(time), 300, val=batches(1), val_check_interval=3, num_sanity_val_steps=0)
    whole = plugin.report.of("tuning").details
    assert whole.startswith("whole plan  faster: 1.")


def test_batches_of_many_sizes_are_compared_by_element() -> None:
    sizes = torch.randint(1, 33, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    with simulated(1.5) as time:
        data = [torch.ones(size, 8) for size in sizes]
        plugin = fit(Timed(time), loader=DataLoader(data, batch_size=None, collate_fn=lambda tensor: [tensor]))  # type: ignore[arg-type]
    assert "whole plan  faster: 1." in plugin.report.of("tuning").details


@pytest.mark.parametrize(
    "callback", [StochasticWeightAveraging(1e-2, swa_epoch_start=1), LearningRateFinder(num_training_steps=20)]
)
def test_callbacks_that_take_a_run_in_hand(callback: Any) -> None:
    with simulated(1.5) as time:
        model = Timed(time)
        model.lr = 0.01  # type: ignore[assignment]  # what the finder looks for
        plugin = fit(model, 80, max_epochs=3, callbacks=[callback], gradient_clip_val=1.0)
    assert "over plain" in status(plugin)


def test_a_later_run_audits_what_it_remembers_after_a_search_for_the_learning_rate() -> None:
    with simulated(1.5) as time:
        fit(Timed(time), 200)
        Speed.speedup = 0.8
        model = Timed(time)
        model.lr = 0.01  # type: ignore[assignment]
        fit(model, 200, callbacks=[LearningRateFinder(num_training_steps=20)])
    assert model.seen[-1] == "off"


def test_a_search_for_the_batch_size_comes_before_the_trials() -> None:
    """What is settled belongs to the size that was found, not to the one of the search's first steps."""

    class Sized(Timed):
        batch_size = 2

        def train_dataloader(self) -> DataLoader[Any]:
            return batches(200, self.batch_size)

        def val_dataloader(self) -> DataLoader[Any]:
            return batches(1, self.batch_size)

    with simulated(1.5) as time:
        model = Sized(time)
        search = BatchSizeFinder(init_val=2, max_trials=3, steps_per_trial=8)
        plugin = AccelPlugin.from_plan(Plan().replace(report=False, **OTHERS_OFF))
        quiet_trainer(plugin, callbacks=[search]).fit(model)
    assert model.batch_size == 8
    assert "over plain" in status(plugin)
    (entry,) = TUNINGS.entries()
    assert isinstance(entry, Entry)
    assert entry.key["batch"] == "[[3, 3]]"  # 8 samples of 8 numbers, as powers of two


def test_overfitting_batches() -> None:
    with simulated(1.5) as time:
        plugin = fit(Timed(time), 4, max_epochs=60, overfit_batches=4)
    assert "over plain" in status(plugin)


def test_a_resumed_run_goes_on_with_what_was_settled(tmp_path: Path) -> None:
    with simulated(0.8) as time:
        first, resumed = Timed(time), Timed(time)
        fit(first, 100)
        first.trainer.save_checkpoint(tmp_path / "first.ckpt")
        for name in STORES:
            Store(name).clear()
        plugin = fit(resumed, 100, max_epochs=2, ckpt_path=str(tmp_path / "first.ckpt"))
    assert set(resumed.seen[5:]) == {"off"}
    assert status(plugin) == "none of the options on trial was measurably faster; running without them"


def test_a_later_run_begins_with_what_an_earlier_one_has_settled() -> None:
    with simulated(0.8) as time:
        fit(Timed(time), 200)
        model = Timed(time)
        fit(model, 40)
    assert set(model.seen[5:]) == {"off"}


def test_a_long_later_run_of_what_settled_on_plain_stays_plain() -> None:
    with simulated(0.8) as time:
        fit(Timed(time), 200)
        model = Timed(time)
        plugin = fit(model, 200)
    assert set(model.seen[6:]) == {"off"}
    assert status(plugin) == "none of the options on trial was measurably faster; running without them"


def test_a_proven_plan_stays_in_a_short_later_run_that_cannot_tell() -> None:
    with simulated(1.5) as time:
        fit(Timed(time), 150)
        before = (path := next(TUNINGS.paths())).read_text()
        time.noise, Speed.speedup = 0.05, 1.02
        model = Timed(time)
        plugin = fit(model, 70)
    assert model.seen[-1] == "on"
    assert "audit       cannot tell" in plugin.report.of("tuning").details
    assert status(plugin).endswith("steps of an earlier run")
    assert path.read_text() == before  # with its proof, and the date of it


def test_a_run_that_could_not_tell_has_a_later_one_ask_again() -> None:
    with simulated(1.1) as time:
        time.noise = 0.2
        fit(Timed(time), 70)
        (entry,) = TUNINGS.entries()
        assert isinstance(entry, Entry)
        assert entry.value.is_open_for(200)
        assert entry.value.is_nothing_for(70)  # as long as it was itself
        time.noise = 0.01
        plugin = fit(Timed(time), 200)
    assert status(plugin).endswith("of your own steps")


def test_a_second_fit_after_one_that_was_interrupted_in_its_trials_asks_anew() -> None:
    class Interrupted(Timed):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if len(self.seen) == 20:
                raise RuntimeError("pulled the plug")

    with simulated(0.8) as time:
        model, plugin = Interrupted(time), AccelPlugin.from_plan(Plan().replace(report=False, **OTHERS_OFF))
        with pytest.raises(RuntimeError, match="pulled the plug"):
            fit(model, trainer=quiet_trainer(plugin))
        fit(model, trainer=quiet_trainer(plugin))
    assert status(plugin) == "none of the options on trial was measurably faster; running without them"
    assert "whole plan  not faster" in plugin.report.of("tuning").details


def test_a_long_later_run_audits_what_it_remembers() -> None:
    with simulated(1.5) as time:
        fit(Timed(time), 200)
        Speed.speedup = 0.8
        model = Timed(time)
        fit(model, 200)
    assert model.seen[-1] == "off"


@pytest.mark.medium
def test_a_damaged_memory_is_said_and_not_used() -> None:
    with simulated(1.5) as time:
        fit(Timed(time), 200)
        (path,) = TUNINGS.paths()
        path.write_text("{")
        plugin = fit(Timed(time), 200)
    assert any("is damaged" in note for note in plugin.report.notes)
    assert "over plain" in status(plugin)


def test_a_folder_that_cannot_be_written_to_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.MonkeyPatch.context() as environment, simulated(1.5) as time:
        environment.setenv("LIGHTNING_ACCEL_CACHE", str(tmp_path / "a file"))
        plugin = fit(Timed(time), 200)
    assert any("could not be remembered" in note for note in plugin.report.notes)


@pytest.mark.parametrize("log", [True, False])
def test_the_loggers_are_told_where_there_is_to_be_logging(tmp_path: Path, log: bool) -> None:
    with simulated(1.5) as time:
        fit(Timed(time), 200, logger=CSVLogger(tmp_path, flush_logs_every_n_steps=1), accel={"report": log})
    assert log == any("accel/tuning/ratio" in path.read_text() for path in tmp_path.rglob("metrics.csv"))


def test_a_clock_that_stands_still_settles_nothing_and_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As freezegun has it: of turns that took no time there is no ratio."""
    with simulated(1.5) as time:
        monkeypatch.setattr(time, "advance", lambda ms: None)
        plugin = fit(Timed(time), 100)
    assert plugin.tuning is None


def test_after_the_run_the_report_is_data() -> None:
    with simulated(1.5) as time:
        plugin = fit(Timed(time), 200)
    assert json.loads(plugin.report.to_json())["techniques"]["tuning"]["on"]


@pytest.mark.parametrize("value", ["always", "Measured", 3, None])
def test_an_unknown_setting_is_named(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"trust=.*Allowed: 'measured', 'checked', 'unchecked'"):
        AccelPlugin(trust=value)


def test_one_plugin_serves_several_fits() -> None:
    with simulated(1.5) as time:
        plugin = AccelPlugin.from_plan(Plan().replace(report=False, **OTHERS_OFF))
        for _ in range(2):
            quiet_trainer(plugin).fit(Timed(time), batches(100))
            assert "over plain" in status(plugin)


def test_an_arm_that_runs_out_of_memory_has_lost_and_the_run_goes_on() -> None:
    class Hungry(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx > 10 and Speed.latest.now == "on":
                raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
            return super().training_step(batch, batch_idx)

    with simulated(1.5) as time:
        model = Hungry(time)
        plugin = fit(model, 100)
    assert len(model.seen) == 100
    assert "whole plan  out of memory" in plugin.report.of("tuning").details
    assert any("ran without it" in note for note in plugin.report.notes)
    assert not any("all of them are taken back" in note for note in plugin.report.notes)


def test_an_error_of_the_users_own_is_theirs() -> None:
    class Broken(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 15:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    with simulated(1.5) as time, pytest.raises(KeyError, match="mine"):
        fit(Broken(time), 100)


def test_a_copy_of_the_plugin_leaves_the_run_behind() -> None:
    copies = []

    class Copying(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 30:
                copies.append(pickle.loads(pickle.dumps(self.trainer.precision_plugin)))
            return super().training_step(batch, batch_idx)

    with simulated(1.5) as time:
        fit(Copying(time), 100)
        (copy,) = copies
        trainer = Trainer(plugins=[copy], max_epochs=1, logger=False, enable_checkpointing=False)
        trainer.fit(Timed(time), batches(100))
        assert "over plain" in status(copy)
