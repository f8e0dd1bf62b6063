"""Runs that begin plain, whose clock is simulated: what :mod:`plugin.test_plain_start` and those beside it train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from support.live_runs import BATCH_SIZE, SimulatedTime, Speed, Timed, simulated

STEP_S = 0.01


class Beginner(Timed):
    """Its steps take 10 ms; ``seen`` has "plain" for those that run before there is a technique, or after."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append("on" if There.is_around else "plain")
        self.time.advance(10 / (Speed.speedup if There.is_around else 1.0) * len(batch[0]) / BATCH_SIZE)
        return self.trained(batch)


class There(Speed):
    """Makes faster only those steps that it is around."""

    is_around = False

    def __init__(self) -> None:
        super().__init__()
        Speed.latest = self

    @contextmanager
    def step(self, stage: str) -> Iterator[None]:  # type: ignore[override]
        There.is_around = self.now == "on"
        yield
        There.is_around = False


@contextmanager
def begun(speedup: float) -> Iterator[SimulatedTime]:
    with simulated(speedup) as time:
        time.noise = 0.001
        yield time
