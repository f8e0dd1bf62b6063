"""An error of this library's own between two steps ends its work. The run goes on as the user wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_accel import AccelPlugin, Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.core.report import AccelWarning
from lightning_accel.lightning.plain_start import PlainStart
from lightning_accel.tuning.trials import LiveTrials
from support.live_runs import OTHERS_OFF, fit
from support.plugin.beginners import Beginner, begun

pytestmark = [pytest.mark.purse, pytest.mark.usefixtures("new_to_this_process")]

STEPS = 300


def failing_at(call: int, original: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise ZeroDivisionError("float division by zero")
        return original(*args)

    return fails


def trained(**settings: Any) -> tuple[Beginner, list[Tensor], AccelPlugin]:
    torch.manual_seed(0)
    with begun(2.0) as time:
        plugin = fit(model := Beginner(time), STEPS, **settings)
    return model, [*model.parameters()], plugin


def plain_weights(precision: Any) -> list[Tensor]:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return trained(trainer=Trainer(accelerator="cpu", max_epochs=1, precision=precision, **quiet))[1]


@pytest.mark.parametrize(
    ("kind", "method", "call", "accel"),
    [
        (PlainStart, "_consider", 1, {}),
        (PlainStart, "_go_to_work", 1, {}),
        (LiveTrials, "begin", 1, {}),
        (LiveTrials, "begin", 30, {}),
        (LiveTrials, "begin", 30, {"precision": "bf16-mixed"}),
        (LiveTrials, "begin", 30, {"memory": {"checkpoint": "full", "blocks": ["layer"]}}),
    ],
)
def test_the_rest_of_the_run_is_the_users_own(
    kind: type, method: str, call: int, accel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_weights(accel.get("precision", "32-true"))
    monkeypatch.setattr(kind, method, failing_at(call, getattr(kind, method)))
    with pytest.warns(AccelWarning, match=r"raised ZeroDivisionError: .*\. The rest of the run is the user's own"):
        model, weights, plugin = trained(accel=accel)
    assert len(model.seen) == STEPS
    assert set(model.seen[call + 20 :]) == {"plain"}
    assert all(map(torch.equal, weights, expected))
    assert "ZeroDivisionError" in plugin.report.to_text()


def test_a_strict_run_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveTrials, "begin", failing_at(30, LiveTrials.begin))
    with pytest.raises(ZeroDivisionError):
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
        with pytest.warns(AccelWarning, match="The rest of the loop is the user's own"):
            train(handle)
        assert not handle.engine.has_edits
        handle.undo()
