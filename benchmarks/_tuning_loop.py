"""Training loops that take turns in one process, and what their times show: for :mod:`tuning`, and those on a GPU."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel import Plan, accelerate
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.tuning.trials import LiveTrials
from lightning_accel.tuning.tuning_result import Tuning

CHUNK, FLOOR = 8, 1.03  # of the greedy search
FIRST = 8  # pairs of two loops in turns, until caches are full and the trials of the parts are over
LEAST_ROUNDS, MOST_ROUNDS = 5, 40
QUIET = 2  # steps after the trials of the parts, which arms may wait for

Combination = tuple[
    tuple[str, str], ...
]  # (arm, choice) of those that are on, sorted: what a dictionary can be keyed by


@dataclass(frozen=True)
class Task:
    """What is trained, and on what: ``loss`` takes a batch."""

    module: nn.Module
    loss: Callable[[Any], Tensor]
    batches: Iterator[Any]


def task_of(module: LightningModule, data: Any) -> Task:
    """A LightningModule in a loop without a Trainer; ``data``: a data module, or what yields its batches."""
    if hasattr(data, "setup"):
        data.setup("fit")
        data = data.train_dataloader()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]

    def loss(batch: Any) -> Any:
        return module.training_step(batch, 0)

    def batches() -> Iterator[Any]:
        while True:
            yield from data

    return Task(module, loss, batches())


class PlainLoop:
    """A training loop, a step at a time, with nothing of lightning-accel in it."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.optimizer = torch.optim.AdamW(task.module.parameters(), lr=1e-3)

    def step(self) -> float:
        """Trains on the next batch; seconds, without the wait for it."""
        batch = next(self._task.batches)
        start = time.perf_counter()
        self._train_on(batch)
        return time.perf_counter() - start

    def _train_on(self, batch: Any) -> None:
        self._task.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class AcceleratedLoop(PlainLoop):
    """The same with :func:`~lightning_accel.accelerate`.

    Attributes:
        setup_s: What :meth:`put` has set up, and the seconds it took; None: nothing came of it.
    """

    def __init__(self, task: Task, plan: Plan, steps: int = 1000) -> None:
        super().__init__(task)
        self.handle = accelerate(task.module, plan, optimizers=self.optimizer, steps=steps)
        self._arms: list[Arm] = []
        self._quiet_steps = 0
        self.setup_s: dict[str, float | None] = {}

    @override
    def _train_on(self, batch: Any) -> None:
        scaler = self.handle.scaler
        self._quiet_steps += not self.handle.engine.is_trying
        with self.handle.step():
            loss = self._task.loss(self.handle.batch(batch))
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()

    def arms(self) -> list[Arm]:
        """What can be switched; takes the steps that the trials of the parts need."""
        while not self.knows_arms:
            self.step()
        self._arms = self._arms or self.handle.engine.arms()  # once: one that is off may not offer itself any more
        return self._arms

    @property
    def knows_arms(self) -> bool:
        """Whether the trials of the parts are over, and steps after them."""
        return not self.handle.engine.is_trying and self._quiet_steps >= QUIET

    def put(self, combination: Combination, may_take_s: float = math.inf) -> None:
        """Has the steps to come run so, until it is called again.

        What an arm needs once is done when it is first put in force, in a step of its own, as live trials do it: blocks
        are compiled, say, in about ``may_take_s`` seconds at most.
        """
        choices, begun = dict(combination), []
        for arm in self.arms():
            choice = choices.get(arm.name, OFF)
            if arm.setup is not None and choice != OFF and arm.name not in self.setup_s:
                arm.setup.begin(may_take_s)
                begun.append((arm.name, arm.setup))
            arm.choose(choice)
        self._rest(choices)
        if begun:
            self.step()
        for name, setup in begun:
            self.setup_s[name] = setup.end()

    def close(self) -> None:
        """Gives the module back as it was."""
        self.handle.undo()

    def _rest(self, choices: Mapping[str, str]) -> None:
        self.handle.engine.disable(arm.name for arm in self._arms if arm.name not in choices)


class TunedLoop(AcceleratedLoop):
    """With live trials that time this loop's own steps only: those of another loop may come in between.

    Attributes:
        taken: Steps so far, those of the parts' trials among them.
        settled_at: After how many of them nothing was to be decided any more; 0 before that.
        tuning: What the trials have come to.
    """

    def __init__(self, task: Task, plan: Plan, steps: int) -> None:
        super().__init__(task, plan, steps)
        self.taken = self.settled_at = 0
        self._steps = steps
        self.tuning = Tuning()
        self._trials: LiveTrials | None = None
        self._is_finished = False

    def finish(self) -> None:
        """Ends the trials; what runs from here on is for :meth:`put` to say."""
        self._trials, self._is_finished = None, True

    @override
    def step(self) -> float:
        seconds = super().step()
        self.taken += 1
        if self._trials is not None:
            self._trials.took(seconds)
            if not self.settled_at and (self.tuning.is_settled or not self._arms):
                self.settled_at = self.taken
        return seconds

    @override
    def _train_on(self, batch: Any) -> None:
        if self._trials is None and not self._is_finished and self.knows_arms:
            self._trials = LiveTrials(self.arms(), self._steps - self.taken, put=self._rest)
            self.tuning = self._trials.tuning
        if self._trials is not None:
            self._trials.begin()  # within the step's time: what the trials themselves cost is in it
        super()._train_on(batch)


@dataclass(frozen=True)
class Settled:
    """What the live trials of a handle have come to.

    Attributes:
        choices: What holds; the best so far where the loop was cut off.
        steps: After so many steps.
        is_settled: Whether nothing is to be decided any more; else the loop was cut off.
        tuning: All that was found.
        compiled: By :func:`settled_loop`: what the report says of ``compile``, what came of it or why it was not tried.
    """

    choices: Combination
    steps: int
    is_settled: bool
    tuning: Tuning
    compiled: str = ""

    def __str__(self) -> str:
        when = "after" if self.is_settled else "not settled, cut off after"
        return f"{in_words(self.choices)}, {when} {self.steps} steps"


def run_until_settled(loop: AcceleratedLoop, steps: int, seconds: float = math.inf) -> Settled:
    """Trains until nothing is to be decided any more, at most so long, and at least until the trials have begun."""
    taken, end = 0, time.perf_counter() + seconds
    while True:
        loop.step()
        taken += 1
        tuning = loop.handle.tuning
        if tuning is not None and (tuning.is_settled or not loop.arms()):
            return Settled(chosen(tuning), taken, True, tuning)
        if tuning is not None and (taken >= steps or time.perf_counter() > end):
            return Settled(chosen(tuning), taken, False, tuning)


def settled_loop(
    make: Callable[[], Task], plan: Plan, steps: int, seconds: float = math.inf
) -> tuple[AcceleratedLoop, Settled]:
    """What live trials come to in a run of so many steps, in force in a loop that tries nothing any more.

    The trials have a loop of their own, which may be cut off in the midst of a comparison, and is let go. A settled run
    looks at the plain one again every so often, too: what is timed here does not.

    Args:
        make: Makes what is trained; called twice.
        plan: With live trials.
        steps: That the trials are told of.
        seconds: After which they are cut off.
    """
    loop = AcceleratedLoop(make(), plan, steps)
    found = run_until_settled(loop, steps, seconds)
    loop.handle.engine.apply_updates()
    found = replace(found, compiled=loop.handle.report.of("compile").status)
    loop.close()
    del loop
    gc.collect()
    loop = AcceleratedLoop(make(), plan.replace(trust="checked"))
    loop.put(found.choices)
    return loop, found


def chosen(tuning: Tuning) -> Combination:
    return tuple(sorted(tuning.choices.items()))


def in_words(combination: Combination) -> str:
    return ", ".join(name if choice == "on" else f"{name}={choice}" for name, choice in combination) or "plain"


# -- what is compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """Two loops that took turns: what each step of a pair took, in seconds."""

    plain: Sequence[float]
    other: Sequence[float]

    def over_all(self) -> str:
        """Plain's time over the other's, all steps of each added up, with its interval by resampling pairs.

        The first pairs, in which the parts are tried once and for all, are not resampled but stay in every sum.
        Efron, "Bootstrap methods: another look at the jackknife" (1979), https://doi.org/10.1214/aos/1176344552.
        """
        pairs = np.asarray([self.plain, self.other])
        first, rest = pairs[:, :FIRST].sum(axis=1), pairs[:, FIRST:]
        places = np.random.default_rng(0).integers(rest.shape[1], size=(2000, rest.shape[1]))
        plain, other = first[:, None] + rest[:, places].sum(axis=2)
        low, high = np.percentile(plain / other, [2.5, 97.5])
        return f"{pairs[0].sum() / pairs[1].sum():.3f}x [{low:.3f}, {high:.3f}]"

    def median(self) -> float:
        """Of the ratios of pairs, by which no slow minute counts for more than its pairs."""
        return statistics.median(a / b for a, b in zip(self.plain, self.other, strict=True))

    def by_tenths(self) -> list[float]:
        """The ratio for each tenth of the steps, in their order: trials come early, what they gain comes later."""
        tenths = min(10, len(self.plain))
        sums = (map(sum, np.array_split(np.asarray(side), tenths)) for side in (self.plain, self.other))
        return [round(float(a / b), 3) for a, b in zip(*sums, strict=True)]


def beside(plain: PlainLoop, other: PlainLoop, steps: int) -> Beside:
    """Has two loops train in turns, a step each, in an order that a coin decides."""
    coin = random.Random(0)
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        first = coin.randrange(2)
        for index in (first, 1 - first):
            spent[index].append((plain, other)[index].step())
    return Beside(*spent)


def in_turns(
    loop: AcceleratedLoop, combinations: Sequence[Combination], seconds: float
) -> dict[Combination, list[float]]:
    """What steps of each combination take, round by round, in random order; as many rounds as there is time for."""
    spent: dict[Combination, list[float]] = {each: [] for each in combinations}
    coin, end = random.Random(0), time.perf_counter() + seconds
    rounds = 0
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() < end):
        for combination in coin.sample(combinations, len(combinations)):
            loop.put(combination)
            loop.step()  # pays for the switch
            spent[combination].append(statistics.fmean((loop.step(), loop.step())))
        rounds += 1
    return spent


def all_combinations(arms: Sequence[Arm]) -> list[Combination]:
    found: list[Combination] = [()]
    for arm in arms:
        found += [tuple(sorted((*each, (arm.name, choice)))) for each in found for choice in arm.choices]
    return found


def greedy(loop: AcceleratedLoop, arms: Sequence[Arm]) -> tuple[Combination, int]:
    """As pytorch-autotune 2.0 searches: one arm after the other, by medians of chunks, with a floor of 3%.

    Returns:
        What it keeps, and how many steps that took.
    """
    kept: Combination = ()
    for arm in arms:
        medians = []
        with_it = tuple(sorted((*kept, (arm.name, arm.choices[0]))))
        for combination in (kept, with_it):
            loop.put(combination)
            medians.append(statistics.median([loop.step() for _ in range(CHUNK)][2:]))
        if medians[0] > FLOOR * medians[1]:
            kept = with_it
    return kept, 2 * CHUNK * len(arms)
