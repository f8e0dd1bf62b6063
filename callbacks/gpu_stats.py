"""What the cards themselves say of every training epoch, to whatever logger the Trainer has."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from typing_extensions import override

from lightning_accel.callbacks._announcements import Announcements
from lightning_accel.callbacks._batch_size import SampleCounter
from lightning_accel.callbacks._epoch_ends import EpochEnds, gather_at_end
from lightning_accel.callbacks._nvml import Card, EnergyMeter, NoCardError
from lightning_accel.core.clocks import Deadline
from lightning_accel.evidence.epoch_speed import PREFIX
from lightning_accel.lightning.packages import Callback, LightningModule, Trainer, callbacks_of

_EVERY_S = 1.0
_MOST_UNTAKEN = 600  # of each value: a record takes them once a minute, and some runs have none
Course = defaultdict[str, deque[float]]  # name → what a card has said, in its order
_VALUES = ("utilisation_percent", "memory_mib", "power_w", "sm_clock_mhz", "temperature_c")
"""What is asked of a card: methods of it."""


@dataclass(kw_only=True)
class CardEpoch:
    """One rank's card in one epoch."""

    # What was read, by names that have the unit; a name that the card does not tell is not there.
    values: dict[str, list[float]] = field(default_factory=dict)
    # Of each time that the card was asked, why it was throttled.
    throttled_by: list[list[str]] = field(default_factory=list)
    energy_j: float | None = None  # what it spent, validation left out; None: not known
    samples: int | None = 0  # that its rank trained on; None: not known


class GpuStats(Callback):
    """Logs what NVML says of the cards in every training epoch, under ``accel/gpu/``.

    ``utilisation_percent``, ``memory_mib`` (in use by all processes), ``power_w``, ``sm_clock_mhz`` and
    ``temperature_c``, each with ``_mean`` and ``_max``; ``throttled_frac``, the part of the epoch in which clocks were
    lower than they could be, and ``throttled_frac_<reason>`` for each reason there was, by its name in NVML
    (``sw_power_cap``, ``hw_thermal_slowdown``, ``sw_thermal_slowdown``, ``hw_power_brake_slowdown``, …), which is said
    once, too; ``energy_j_per_sample``. Over all ranks: means of their cards, the largest of their maxima.

    A card is asked at the end of a step, at most once a second; its own counters answer, and the device is not waited
    for. It is asked by its UUID, so that it is the right one whatever ``CUDA_VISIBLE_DEVICES`` says. Of an instance of
    MIG, memory is its own, clocks and temperature are those of the card, and the rest, in which others have a part, is
    left out.

    What a card does not tell is left out. Without an NVIDIA card, or without NVML (``pip install nvidia-ml-py``), that
    is said once, and the run goes on.

    Args:
        batch_size_fn: As for :class:`SpeedMemoryLogger`.

    Attributes:
        history: What was logged for each epoch, by name.
    """

    def __init__(self, batch_size_fn: Callable[[Any], int] | None = None) -> None:
        super().__init__()
        self.history: list[dict[str, float]] = []
        self._batch_size_fn = batch_size_fn
        self._fit: _FitStats | None = None
        # Of the fit, as far as nobody has taken it.
        self._course: Course = defaultdict(partial(deque, (), _MOST_UNTAKEN))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self._course.clear()
        self._fit = _FitStats(trainer, self._batch_size_fn, self._course)
        self._fit.restart()  # a run that resumes within an epoch has no on_train_epoch_start

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.restart()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._fit is not None and self._fit.ends is not None:
            self._fit.ends.step_begins(batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.step_ended(batch)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.energy.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.energy.resume()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {} if self._fit is None else self._fit.measure()
        if not metrics:
            return
        self.history.append(metrics)
        if not trainer.barebones:
            # The ranks have been put together; see SpeedMemoryLogger.
            pl_module.log_dict(metrics, on_step=False, on_epoch=True, sync_dist=True, rank_zero_only=True, batch_size=1)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def take_course(self) -> dict[str, list[float]]:
        """What this rank's card has said of the fit since it was last taken, in its order, by the names of metrics."""
        taken = {name: list(values) for name, values in self._course.items()}
        self._course.clear()
        return taken

    def _close(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None and fit.card is not None:
            fit.card.close()


class _FitStats:
    """One fit's card on this rank, and what the ranks know together."""

    def __init__(self, trainer: Trainer, batch_size_fn: Callable[[Any], int] | None, course: Course) -> None:
        self._course = course
        self._notes = Announcements(trainer)
        self._trainer = trainer
        self.card: Card | None = None
        try:
            self.card = Card.open(trainer.strategy.root_device)
        except NoCardError as error:
            self._notes.say(f"GpuStats logs nothing of rank {trainer.global_rank}: {error}.")
        self.energy = EnergyMeter(self.card)
        self.ends = EpochEnds.open(trainer)
        self._samples = SampleCounter(batch_size_fn, self._notes.say, "GpuStats", "energy_j_per_sample")
        self._epoch = CardEpoch()
        self._due = Deadline(0.0)

    def restart(self) -> None:
        self._epoch, self._due = CardEpoch(), Deadline(0.0)
        self.energy.restart()

    def step_ended(self, batch: Any) -> None:
        if self.ends is not None:
            self.ends.step_ended()
        if self.card is None:
            return
        samples, epoch = self._samples.count(batch), self._epoch
        epoch.samples = None if samples is None or epoch.samples is None else epoch.samples + samples
        if self._due.is_over():
            self._due = Deadline(_EVERY_S)
            self._ask(self.card)

    def measure(self) -> dict[str, float]:
        """What is logged of the epoch; a collective call of ranks that end it together."""
        self._epoch.energy_j = self.energy.joules()
        cards = gather_at_end(self._trainer, self.ends, self._epoch)
        for reason in sorted({reason for card in cards for reasons in card.throttled_by for reason in reasons}):
            self._notes.say(f"the clocks of a GPU were throttled: {reason} (accel/gpu/throttled_frac_{reason}).")
        return put_together(cards)

    def _ask(self, card: Card) -> None:
        for name in _VALUES:
            if (value := getattr(card, name)()) is not None:
                self._epoch.values.setdefault(name, []).append(value)
                self._course[name].append(value)
        if (reasons := card.throttled_by()) is not None:
            self._epoch.throttled_by.append(reasons)
            self._course["throttled_frac"].append(float(bool(reasons)))


def put_together(cards: Sequence[CardEpoch]) -> dict[str, float]:
    """What is logged of the cards of all ranks, under ``accel/gpu/``; the same names on each."""
    found: dict[str, float] = {}
    for name in _VALUES:
        each = [card.values[name] for card in cards if name in card.values]
        if each:
            over_ranks = {"mean": statistics.fmean(map(statistics.fmean, each)), "max": max(map(max, each))}
            found |= {f"{name}_{kind}": value for kind, value in over_ranks.items()}
    asked = [reasons for card in cards for reasons in card.throttled_by]
    if asked:
        found["throttled_frac"] = _part(bool(reasons) for reasons in asked)
        for reason in sorted({reason for reasons in asked for reason in reasons}):
            found[f"throttled_frac_{reason}"] = _part(reason in reasons for reasons in asked)
    energy_j = [card.energy_j for card in cards if card.energy_j is not None]
    samples = [card.samples for card in cards if card.samples]
    if len(energy_j) == len(samples) == len(cards):
        found["energy_j_per_sample"] = sum(energy_j) / sum(samples)
    return {f"{PREFIX}gpu/{name}": value for name, value in found.items()}


def _part(answers: Iterable[bool]) -> float:
    return statistics.fmean(map(float, answers))


def course_of_cards(trainer: Trainer) -> dict[str, list[float]]:
    """What this rank's card has said since it was last asked for; empty without a GpuStats in its fit."""
    taken = [one.take_course() for one in callbacks_of(trainer, GpuStats)]
    return next(filter(None, taken), {})


def told_by_cards(trainer: Trainer) -> dict[str, float]:
    """What a Trainer's GpuStats has logged, over all its epochs, without the prefix; empty without one."""
    epochs = [epoch for one in callbacks_of(trainer, GpuStats) for epoch in one.history]
    found = {}
    for name in dict.fromkeys(name for epoch in epochs for name in epoch):
        values = [epoch[name] for epoch in epochs if name in epoch]
        found[name.removeprefix(f"{PREFIX}gpu/")] = max(values) if name.endswith("_max") else statistics.fmean(values)
    return found
