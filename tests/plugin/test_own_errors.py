"""An error of this library's own between two steps ends its trials. The training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_accel import AccelPlugin, Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.core.checks import SettingError
from lightning_accel.core.report import AccelError, AccelWarning
from lightning_accel.data import Map
from lightning_accel.lightning import plugin as plugin_module
from lightning_accel.lightning import run as run_module
from lightning_accel.lightning.plain_start import PlainStart
from lightning_accel.lightning.run import Run
from lightning_accel.techniques.arms import Arm
from lightning_accel.tuning.trials import LiveTrials
from support.live_runs import OTHERS_OFF, Speed, fit
from support.plugin.beginners import Beginner, begun

pytestmark = [pytest.mark.purse, pytest.mark.usefixtures("new_to_this_process")]

STEPS = 300
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


def failing_at(call: int, original: Callable[..., Any], error: Exception | None = None) -> Callable[..., Any]:
    calls = 0

    def fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error or ZeroDivisionError("float division by zero")
        return original(*args)

    return fails


def doubled(xp: Any, batch: list[Any]) -> list[Any]:
    return [2 * array for array in batch]


def trained(**settings: Any) -> tuple[Beginner, list[Tensor], AccelPlugin]:
    torch.manual_seed(0)
    with begun(2.0) as time:
        plugin = fit(model := Beginner(time), STEPS, **settings)
    return model, [*model.parameters()], plugin


def plain_weights(precision: Any = "32-true", **limits: Any) -> list[Tensor]:
    return trained(trainer=Trainer(accelerator="cpu", max_epochs=1, precision=precision, **QUIET, **limits))[1]


@pytest.mark.parametrize(
    ("kind", "method", "call"),
    [(PlainStart, "_consider", 1), (PlainStart, "_go_to_work", 1), (Run, "start", 1), (PlainStart, "_try_the_rest", 9)],
)
def test_before_the_trials_it_leaves_the_run_to_the_user(
    kind: type, method: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_weights()
    monkeypatch.setattr(kind, method, failing_at(call, getattr(kind, method)))
    with pytest.warns(AccelWarning, match=r"raised ZeroDivisionError: .*\. The rest of the run is the user's own"):
        model, weights, plugin = trained()
    assert len(model.seen) == STEPS
    assert set(model.seen[call + 20 :]) == {"plain"}
    assert all(map(torch.equal, weights, expected))
    assert "ZeroDivisionError" in plugin.report.to_text()


@pytest.mark.parametrize("call", [1, 30])
@pytest.mark.parametrize("accel", [{}, {"precision": "bf16-mixed"}], ids=str)
def test_in_the_trials_it_leaves_the_run_to_the_user(
    call: int, accel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_weights(accel.get("precision", "32-true"))
    monkeypatch.setattr(LiveTrials, "begin", failing_at(call, LiveTrials.begin))
    with pytest.warns(AccelWarning, match=r"raised ZeroDivisionError: .*: it tries nothing more"):
        model, weights, plugin = trained(accel=accel)
    assert len(model.seen) == STEPS
    assert set(model.seen[call + 20 :]) == {"plain"}
    assert all(map(torch.equal, weights, expected))
    assert "ZeroDivisionError" in plugin.report.to_text()


@pytest.mark.parametrize(
    ("name", "setting"),
    [("gradient_checkpointing", {"mode": "full", "blocks": ["layer"]}), ("preprocess", [Map(doubled)])],
)
def test_what_the_user_asks_for_by_name_stays(name: str, setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(accel={name: setting, "trust": "checked"})
    monkeypatch.setattr(LiveTrials, "begin", failing_at(30, LiveTrials.begin))
    with pytest.warns(AccelWarning, match="it tries nothing more"):
        model, weights, plugin = trained(accel={name: setting})
    assert len(model.seen) == len(whole[0].seen) == STEPS
    assert all(map(torch.equal, weights, whole[1]))
    assert plugin.report.of(name).is_on
    assert set(model.seen[50:]) == {"plain"}


def test_a_run_that_guards_its_memory_goes_on_to_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plugin_module, run_module):
        monkeypatch.setattr(module, "may_lack_memory", lambda device: True)
    guarded: list[bool] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            plugin: Any = trainer.precision_plugin
            guarded.append(plugin._run is not None and plugin._run.memory.is_on)

    monkeypatch.setattr(LiveTrials, "begin", failing_at(30, LiveTrials.begin))
    with pytest.warns(AccelWarning, match="it tries nothing more"):
        model, *_ = trained(callbacks=[Looks()])
    assert guarded == [True] * STEPS
    assert set(model.seen[50:]) == {"plain"}


def test_what_cannot_be_switched_off_is_reverted() -> None:
    chosen: list[str] = []
    arms = [
        Arm(name="stuck", choices=("on",), choose=failing_at(1, chosen.append)),
        Arm(name="other", choices=("on",), choose=chosen.append),
    ]
    reverted: list[str] = []
    trials = LiveTrials(arms, 100)
    trials.end(reverted.append)
    assert (reverted, chosen, trials.is_over) == (["stuck"], ["off"], True)


@pytest.mark.parametrize("error", [SettingError("compile='of' is not allowed"), UserWarning("an error by -W error")])
def test_what_is_for_the_user_reaches_the_user(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveTrials, "begin", failing_at(30, LiveTrials.begin, error))
    with pytest.raises(type(error), match=str(error)):
        trained()


def test_a_strict_run_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveTrials, "begin", failing_at(30, LiveTrials.begin))
    with pytest.raises(AccelError, match="ZeroDivisionError"):
        trained(accel={"strict": True})


def test_a_plain_loop_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveTrials, "begin", failing_at(3, LiveTrials.begin))
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def train(handle: AcceleratedModel) -> None:
        for _ in range(20):
            with handle.step():
                loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()

    with begun(2.0):
        handle = accelerate(model, Plan().replace(**OTHERS_OFF), steps=STEPS)
        with pytest.warns(AccelWarning, match="it tries nothing more"):
            train(handle)
        assert Speed.latest.now == "off"
        handle.undo()
