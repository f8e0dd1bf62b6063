"""The purse: 2% of a run, 5% of its first steps, a tenth of a second before the first one is over."""

from __future__ import annotations

import logging
import math

import pytest
from lightning_utilities.core import rank_zero

from lightning_accel.core.open_purse import OpenPurse
from lightning_accel.core.purse import Purse
from support.console import heard


class Clock:
    """Stands still but for what is spent."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def purse_of(steps: float, *, step_s: float = 1.0, done: int = 3) -> Purse:
    purse = Purse()
    purse.steps, purse.done = steps, done
    purse.step_took(step_s)
    return purse


def test_before_the_first_step_is_over_there_is_a_tenth_of_a_second() -> None:
    assert Purse().left_s == 0.1


@pytest.mark.parametrize(
    ("steps", "done", "left"),
    [
        pytest.param(20, 3, 0.4, id="2% of a short run"),
        pytest.param(100_000, 3, 5.0, id="5% of the first 100 steps of a long one"),
        pytest.param(100_000, 1_000, 50.0, id="5% of the steps so far: it may end early"),
        pytest.param(1_000, 900, 20.0, id="2% of the whole"),
        pytest.param(math.inf, 3, 4.0, id="2% of twice the steps so far, where no end is known"),
    ],
)
def test_what_there_is_to_spend_after_so_many_steps_of_a_second(steps: float, done: int, left: float) -> None:
    assert purse_of(steps, done=done).left_s == pytest.approx(left)


def test_a_step_takes_the_median_of_the_latest() -> None:
    purse = purse_of(1_000, step_s=1.0)
    for seconds in (9.0, 1.0):  # a hiccup among them
        purse.step_took(seconds)
    assert purse.step_s == 1.0


def test_a_step_of_which_payments_have_left_no_time_tells_nothing() -> None:
    purse = Purse()
    purse.step_took(0.0)
    purse.step_took(-0.5)
    assert purse.step_s is None
    purse.step_took(2.0)
    assert purse.step_s == 2.0


def test_what_faster_steps_have_saved_may_be_spent_again() -> None:
    purse = purse_of(100)
    purse.earned_s += 3.0
    assert purse.can_pay(5.0)
    assert purse.spent_s == {}


@pytest.mark.parametrize(
    ("steps", "done", "left", "to_come"),
    [
        pytest.param(1_000, 200, 20.0, 100.0, id="no more ahead than 5% of the steps so far"),
        pytest.param(1_000, 900, 25.0, 30.0, id="half of what the last steps will save"),
        pytest.param(1_000, 1_000, 20.0, 20.0, id="nothing after the last"),
    ],
)
def test_half_of_what_proven_steps_will_save_may_be_spent_ahead(
    steps: int, done: int, left: float, to_come: float
) -> None:
    purse = purse_of(steps, done=done)
    purse.saved_share = 0.1
    assert (purse.left_s, purse.to_come_s) == pytest.approx((left, to_come))


def test_what_was_paid_is_no_longer_there() -> None:
    purse = purse_of(100)
    purse.pay("trials", 1.5)
    assert purse.left_s == pytest.approx(0.5)
    assert purse.can_pay(0.5)
    assert not purse.can_pay(0.6)


def test_what_is_paid_within_another_payment_is_counted_once() -> None:
    clock = Clock()
    purse = Purse(clock)
    with purse.paying("setting up"):
        clock.now += 2.0
        with purse.paying("logging"):
            clock.now += 1.0
    assert dict(purse.spent_s) == {"logging": 1.0, "setting up": 2.0}


def test_a_payment_that_raises_is_made_all_the_same() -> None:
    clock = Clock()
    purse = Purse(clock)

    def trial() -> None:
        with purse.paying("trials"):
            clock.now += 1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        trial()
    assert purse.spent_s["trials"] == 1.0


def test_it_tells_what_was_spent_on_what_the_most_first() -> None:
    purse = purse_of(100)
    purse.pay("logging", 0.25)
    purse.pay("trials", 1.5)
    assert purse.line() == "1.75 s (trials 1.5 s, logging 0.25 s)"


def test_a_long_trial_is_announced_in_a_program_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which alone sets the rank by which lightning_utilities tells who may speak."""
    monkeypatch.delattr(rank_zero.rank_zero_only, "rank", raising=False)
    monkeypatch.setattr(rank_zero, "log", logging.getLogger("lightning.pytorch.utilities.rank_zero"))
    with heard() as lines:
        OpenPurse("compile").pay("trials", 2.0)
    assert lines == ["lightning-accel: still trying compile, which has taken 2.0 s"]
