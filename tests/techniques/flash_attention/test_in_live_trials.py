"""Flash attention while live trials switch a run between plain steps and others."""

from __future__ import annotations

import pytest

from lightning_accel.techniques.arms import OFF
from lightning_accel.techniques.technique_context import Verdict
from support.attention_zoo import FOUND
from support.techniques.flash_attention.technique_runs import Stack, batch, clock, dispatches, start, step

pytestmark = pytest.mark.numbers


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_refused_site_is_asked_again_for_other_shapes_but_not_in_plain_steps(
    is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(monkeypatch, speed=0.5)
    model = Stack(FOUND["at_sign"])
    handle = start(model, "auto")
    for _ in range(2):
        step(model, handle, batch())
    assert handle.engine.arms() == []  # nothing was faster, so live trials have nothing to switch
    clock(monkeypatch, speed=2.0)
    handle.engine.disable((), pauses=lambda name: is_plain)
    for _ in range(2):
        step(model, handle, batch(length=64))
    assert handle.report.applied("flash_attention") == ([] if is_plain else ["layers.0", "layers.1"])
    handle.engine.revert_all("a step raised", "flash_attention", "refused")
    assert not any(dispatch.is_used for dispatch in dispatches(handle).values())
    handle.undo()


def test_a_site_that_was_refused_in_mid_run_stays_off_when_the_others_are_switched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock(monkeypatch, speed=2.0)
    model = Stack(FOUND["at_sign"])
    handle = start(model, "auto")
    for _ in range(2):
        step(model, handle, batch())
    (arm,) = handle.engine.arms()
    dispatches(handle)["layers.0"].refuse(Verdict("failed", "failed in mid-run"))
    handle.engine.apply_updates()
    for choice in (OFF, "on"):
        arm.choose(choice)
        step(model, handle, batch())
        assert handle.report.refused("flash_attention") == {"layers.0": "failed in mid-run"}
    handle.undo()
