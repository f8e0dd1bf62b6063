"""Later fits of a program begin with what earlier ones have found, in one process and in the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_accel import AccelPlugin
from lightning_accel.core.patch import AttributePatch, Patch
from lightning_accel.lightning import met_programs
from lightning_accel.settings import Plan
from support.live_runs import BATCH_SIZE, OTHERS_OFF, Speed, batches, fit
from support.plugin.beginners import STEP_S, Beginner, There, begun

pytestmark = [pytest.mark.purse, pytest.mark.usefixtures("new_to_this_process")]


@pytest.mark.medium
def test_the_next_fit_of_a_program_begins_with_what_was_proven() -> None:
    for _ in range(2):
        with begun(2.0) as time:  # which the model holds
            model = Beginner(time)
            fit(model, 1_000)
    assert model.seen[0] == "on"


@pytest.mark.medium
def test_the_next_fit_of_a_program_in_which_nothing_was_faster_does_not_look() -> None:
    for _ in range(2):
        with begun(0.7) as time:
            model = Beginner(time)
            fit(model, 1_000)
    assert set(model.seen) == {"plain"}


@pytest.mark.medium
def test_one_that_is_twice_as_long_looks_again() -> None:
    for steps in (1_000, 2_000):
        with begun(0.7) as time:
            model = Beginner(time)
            fit(model, steps)
    assert set(model.seen) == {"plain", "on"}


@pytest.mark.parametrize("size", [2, 1], ids=["the same", "other batches"])
def test_the_next_of_fits_that_are_too_short_is_not_looked_at(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    monkeypatch.setattr(met_programs, "described", lambda module: looked_at.append(module) or "")
    for batch_size in (2, size):
        with begun(2.0) as time:
            fit(Beginner(time), loader=batches(60, batch_size))
    assert len(looked_at) == 1


def test_a_first_fit_that_is_too_short_is_not_asked_what_setting_up_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure how fast the machine is takes as long as a small step or two."""
    asked: list[int] = []
    monkeypatch.setattr(met_programs, "python_pace", lambda: asked.append(1) or 1.0)
    with begun(2.0) as time:
        fit(Beginner(time), 20)
    assert not asked
    with begun(2.0) as time:
        fit(Beginner(time), 300)
    assert asked


def test_a_fit_that_is_known_to_be_too_short_says_what_it_may_pay() -> None:
    for _ in range(2):
        with begun(2.0) as time:
            plugin = fit(Beginner(time), loader=batches(60, 2))
    assert "the run is too short: 0.006 s is what it may pay, of " in plugin.report.of("speed").status


def test_one_that_is_too_short_to_be_judged_is_not_described_where_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[Any] = []
    monkeypatch.setattr(met_programs, "described", lambda module: looked_at.append(module) or "")
    with begun(2.0) as time:
        fit(Beginner(time), 20)
    assert not looked_at


def test_a_fit_of_much_larger_batches_is_not_taken_to_be_as_short() -> None:
    for size in (1, 100 * BATCH_SIZE):
        with begun(2.0) as time:
            model = Beginner(time)
            fit(model, loader=batches(100, size))
    assert "on" in model.seen


@pytest.mark.medium
def test_a_short_fit_that_remembers_leaves_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (1_000, 250, 250):
        monkeypatch.setattr(met_programs, "PROGRAMS", {})  # as another process has it
        with begun(2.0) as time:
            model = Beginner(time)
            fit(model, steps)
    assert "on" in model.seen


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_that_takes_its_batches_from_the_loader_itself_is_at_work_from_the_first(tmp_path: Path) -> None:
    class Takes(Beginner):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, *_ = next(dataloader_iter)
            return super().training_step(batch, 0)

    with begun(2.0) as time:
        model = Takes(time)
        fit(model, 5)
    assert set(model.seen) == {"on"}


def test_a_validation_that_begins_slowly_is_no_step() -> None:
    class Slow(Callback):
        def on_validation_start(self, trainer: Trainer, module: Any) -> None:
            module.time.advance(500)

    with begun(2.0) as time:
        plugin = fit(Beginner(time), 30, val=batches(1), val_check_interval=1, callbacks=[Slow()])
    assert plugin.purse is not None
    assert plugin.purse.step_s == pytest.approx(STEP_S, rel=0.05)


@pytest.mark.medium
def test_a_test_after_a_fit_in_which_nothing_was_faster_is_plain() -> None:
    class Tested(Beginner):
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.seen.append("on" if There.is_around else "plain")

    with begun(0.7) as time:
        model, plugin = Tested(time), AccelPlugin.from_plan(Plan().replace(report=False, **OTHERS_OFF))
        quiet: dict[str, Any] = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False}
        trainer = Trainer(plugins=[plugin], accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet)
        trainer.fit(model, batches(1_000))
        model.seen.clear()
        trainer.test(model, batches(3), verbose=False)
    assert model.seen == ["plain"] * 3


@pytest.mark.medium
def test_a_fit_in_another_process_knows_it_after_its_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(2.0) as time:
        fit(Beginner(time), 1_000)
    monkeypatch.setattr(met_programs, "PROGRAMS", {})  # as another process has it
    with begun(2.0) as time:  # which the model holds
        model = Beginner(time)
        fit(model, 250)
    assert model.seen[4] == "on"
    assert model.seen.count("on") > 60


class DearToSetUp(There):
    """Takes as long as 40 steps to set up."""

    def sites(self, model: nn.Module, host: Any) -> list[Patch]:
        self.run.setup_s = 40 * STEP_S
        return [AttributePatch("layer", "is faster", model.get_submodule("layer"), "is_faster", True)]


@pytest.mark.parametrize(
    ("speedup", "steps", "is_used"),
    [(2.0, 500, True), (1.1, 500, False), (2.0, 100, False)],
    ids=["pays", "saves too little", "the run is too short"],
)
def test_what_was_proven_is_set_up_where_it_pays_in_this_run(
    speedup: float, steps: int, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speed, "from_settings", classmethod(lambda cls, *_: DearToSetUp()))
    with begun(speedup) as time:
        fit(Beginner(time), 2_500)
    monkeypatch.setattr(met_programs, "PROGRAMS", {})  # as another process has it
    with begun(speedup) as time:
        model = Beginner(time)
        fit(model, steps)
    assert ("on" in model.seen) is is_used
    if is_used:
        assert model.seen.index("on") < 10


@pytest.mark.medium
def test_a_resumed_run_goes_on_with_its_plan(tmp_path: Path) -> None:
    with begun(2.0) as time:
        trainer_of: dict[str, Any] = {"enable_checkpointing": False, "max_epochs": 1}
        plugin = AccelPlugin.from_plan(Plan().replace(report=False, **OTHERS_OFF))
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = Trainer(plugins=[plugin], accelerator="cpu", **quiet, **trainer_of)
        trainer.fit(Beginner(time), batches(300))
        trainer.save_checkpoint(tmp_path / "resumed.ckpt")
        model = Beginner(time)
        fit(model, 300, ckpt_path=tmp_path / "resumed.ckpt", max_epochs=2)
    assert set(model.seen[:50]) == {"on"}
