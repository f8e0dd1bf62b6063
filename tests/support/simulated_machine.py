"""A simulated machine: what a step takes is a formula, so that what live trials should decide is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from lightning_accel.techniques.arms import Arm
from lightning_accel.tuning.trials import LiveTrials
from lightning_accel.tuning.tuning_result import Tuning


class SimulatedRun:
    """A run whose arms make a step so many times as fast; all noise is drawn from ``seed``, by Student's t with 3.

    Args:
        speedups: Of each arm, or of each choice of it; by a number, the arm is on or off.
        turns: Of the run.
        noise: The scale of the log of what a step takes.
        seed: Of the noise.
        settle: Turns after a switch that are not counted, by arm.
        **arm: More of every arm.
    """

    def __init__(
        self,
        speedups: Mapping[str, float | Mapping[str, float]],
        turns: int = 1000,
        *,
        noise: float = 0.03,
        seed: int = 0,
        settle: Mapping[str, int] | None = None,
        **arm: object,
    ) -> None:
        self.speedups = {name: one if isinstance(one, Mapping) else {"on": one} for name, one in speedups.items()}
        self.turns, self.noise = turns, noise
        self.now = {name: next(iter(choices)) for name, choices in self.speedups.items()}
        self.switches: list[tuple[str, str]] = []
        self.lost: set[str] = set()  # arms whose technique was taken back: they are off, whatever is chosen
        self.lines: list[str] = []
        self.seconds = self.plain_seconds = 0.0
        self.slowdown: Callable[[int], float] = lambda turn: 1.0
        self._seed, self._rng = seed, np.random.default_rng(seed)
        settle = settle or {}
        self.arms = [
            Arm(name, tuple(choices), self.chooser(name), **{"settle": settle.get(name, 0)} | arm)  # type: ignore[arg-type]
            for name, choices in self.speedups.items()
        ]

    def chooser(self, name: str) -> Callable[[str], None]:
        def choose(choice: str) -> None:
            self.switches.append((name, choice))
            self.now[name] = "off" if name in self.lost else choice

        return choose

    def trials(self, **settings: object) -> LiveTrials:
        torch.manual_seed(self._seed)  # from which the coins follow
        return LiveTrials(self.arms, self.turns, say=self.lines.append, **settings)  # type: ignore[arg-type]

    def run(self, **settings: object) -> Tuning:
        trials = self.trials(**settings)
        for turn in range(self.turns):
            trials.begin()
            trials.took(self.step(turn))
        return trials.tuning

    def step(self, turn: int) -> float:
        plain = 0.1 * np.exp(self.noise * self._rng.standard_t(3))
        seconds = plain * self.slowdown(turn)
        for name, choice in self.now.items():
            seconds /= self.speedups[name].get(choice, 1.0)
        self.seconds += seconds
        self.plain_seconds += plain
        return float(seconds)
