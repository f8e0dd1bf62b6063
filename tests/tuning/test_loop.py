"""Live trials in a plain PyTorch loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.core.host import Host
from support.live_runs import OTHERS_OFF, SimulatedTime, Speed, simulated


def train(
    time: SimulatedTime, steps: int = 200, plan: Plan | None = None, **settings: Any
) -> tuple[AcceleratedModel, list[str]]:
    """A loop whose steps take 10 ms of simulated time, less where the arm is on; and what was on in each."""
    model, seen = nn.Linear(8, 2), []
    handle = accelerate(model, plan or Plan().replace(**OTHERS_OFF), steps=steps, **settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        with handle.step():
            loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(Speed.latest.now)
        time.advance(10 / (Speed.speedup if Speed.latest.now == "on" else 1.0))
    return handle, seen


def test_what_is_faster_stays() -> None:
    with simulated(1.5) as time:
        handle, seen = train(time)
        assert seen[-1] == "on"
        assert "over plain" in handle.report.of("tuning").status
        handle.undo()


def test_what_is_slower_goes() -> None:
    with simulated(0.8) as time:
        handle, seen = train(time)
        assert seen[-1] == "off"
        handle.undo()


@pytest.mark.parametrize(("steps", "trust"), [(40, "measured"), (200, "checked")])
def test_a_short_loop_and_one_that_is_told_not_to_try_nothing(steps: int, trust: str) -> None:
    with simulated(0.5) as time:
        handle, seen = train(time, steps, Plan().replace(**OTHERS_OFF, trust=trust))
        assert set(seen) == {"on"}
        handle.undo()


def test_bfloat16_that_we_chose_is_on_trial_and_one_that_was_asked_for_is_not() -> None:
    host = Host(kind="cpu", device_name="a CPU with bfloat16", native_bf16=True)
    for precision, arms in (("auto", ["precision"]), ("bf16-mixed", []), ("32-true", [])):
        handle = accelerate(nn.Linear(8, 2), Plan(precision=precision, trust="checked"), host=host)  # type: ignore[arg-type]
        assert [arm.name for arm in handle.engine.arms()] == arms
        handle.undo()


def test_a_bfloat16_arm_that_is_off_computes_in_float32() -> None:
    host = Host(kind="cpu", device_name="a CPU with bfloat16", native_bf16=True)
    model = nn.Linear(8, 2)
    handle = accelerate(model, Plan(trust="checked"), host=host)
    (arm,) = handle.engine.arms()
    for choice, dtype in (("off", torch.float32), ("bf16-mixed", torch.bfloat16)):
        arm.choose(choice)
        with handle.step():
            assert model(torch.ones(4, 8)).dtype == dtype
    handle.undo()


def test_after_undo_nothing_is_switched_any_more() -> None:
    with simulated(1.5) as time:
        handle, _ = train(time)
        handle.undo()
        before = list(Speed.latest.switches)
        for _ in range(300):
            with handle.step():
                time.advance(10)
        assert Speed.latest.switches == before
        assert handle.tuning is not None
        assert handle.tuning.choices == {"speed": "on"}


def test_a_validation_between_two_steps_is_no_part_of_a_turn() -> None:
    with simulated(1.5) as time:
        model = nn.Linear(8, 2)
        handle = accelerate(model, Plan().replace(**OTHERS_OFF), steps=300)
        for step in range(300):
            with handle.step():
                model(torch.ones(4, 8)).square().mean().backward()
            is_on = Speed.latest.now == "on"
            time.advance(10 / (Speed.speedup if is_on else 1.0))
            if is_on and step % 2:
                with handle.step("validate"):
                    time.advance(1000)
        assert handle.tuning is not None
        assert handle.tuning.choices == {"speed": "on"}
        handle.undo()
