"""What the callbacks have to say of a run as a whole: on the console, and in the plugin's report where there is one.

What trials and techniques decide is told as events, for the record.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_utilities.core import rank_zero
from lightning_utilities.core.rank_zero import rank_prefixed_message

from lightning_accel.callbacks._header import makes_loaders, train_loaders
from lightning_accel.core.host import usable_cores
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.report import Report
from lightning_accel.core.states import SiteChanged
from lightning_accel.data.advice import WORTH_ADVICE, waiting_advice
from lightning_accel.evidence.epoch_speed import EpochSpeed
from lightning_accel.evidence.events import Decision, PlanHeld, TrialDecided
from lightning_accel.lightning.packages import Trainer
from lightning_accel.tuning.tuning_result import Tuning


def report_of(trainer: Trainer) -> Report | None:
    """AccelPlugin's; None in a run without it."""
    report = getattr(trainer.precision_plugin, "report", None)
    return report if isinstance(report, Report) else None


def tuning_of(trainer: Trainer) -> Tuning | None:
    """What live trials have come to by now; None without them."""
    tuning = getattr(trainer.precision_plugin, "tuning", None)
    return tuning if isinstance(tuning, Tuning) else None


def is_held(tuning: Tuning, report: Report | None) -> bool:
    """Whether a fit runs as live trials have settled: one that stays plain has the results of an earlier one alone."""
    acting = () if report is None else [name for name, one in report.techniques.items() if one.acts]
    return not tuning.choices or report is None or not tuning.choices.keys().isdisjoint(acting)


def say(trainer: Trainer, *lines: str) -> None:
    """Says it now, and notes it."""
    if (report := report_of(trainer)) is not None:
        for line in lines:
            report.note(line)
    rank_zero_info(f"lightning-accel: {lines[0]}" if len(lines) == 1 else "\n  ".join(["lightning-accel:", *lines]))


def say_of_rank(trainer: Trainer, line: str) -> None:
    """Says now what this rank has to say, though it may not be the first."""
    rank = trainer.global_rank if trainer.world_size > 1 else None
    rank_zero.log.info(rank_prefixed_message(f"lightning-accel: {line}", rank))


def advise(trainer: Trainer, speed: EpochSpeed, *, has_images: bool) -> bool:
    """Says what to change in a run whose interval has waited long enough for its data; whether it has."""
    if speed.data_wait_frac is None or speed.data_wait_frac <= WORTH_ADVICE:
        return False
    # Of a batch, nothing can be told; and ranks that are not here together do not hear what rank 0 has to say.
    if trainer.fast_dev_run or speed.world_size != trainer.world_size:  # type: ignore[attr-defined]
        return False
    lines = waiting_advice(
        train_loaders(trainer),
        speed.data_wait_frac,
        trainer.strategy.root_device,
        preprocesses=bool(getattr(getattr(trainer.precision_plugin, "plan", None), "preprocess", ())),
        cores=usable_cores(),
        makes_loaders=makes_loaders(trainer),
        has_images=has_images,
    )
    # The wait is that of all ranks, but each times and sets up loaders of its own: what is said is of one run.
    if lines := trainer.strategy.broadcast(lines):
        say(trainer, *lines)
    return True


class Announcements:
    """Says each line once in a fit; it raises and warns of nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._said: set[str] = set()

    def say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            say(self._trainer, line)


class Decisions:
    """Tells of each decision once: of several about one site or trial, since it was last asked, of the last."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._told: dict[object, Decision] = {}

    def new(self, settled_step: int | None) -> list[Decision]:
        """Those since it was last asked; live trials had settled at ``settled_step``, None if they have not."""
        report, tuning = report_of(self._trainer), tuning_of(self._trainer)
        techniques = {} if report is None else report.techniques
        now: dict[object, Decision] = {
            (name, site): change for name, one in techniques.items() for site, change in one.sites.items()
        }
        for key, last in self._told.items():  # a technique that is put on in mid-run, or taken back, has new sites
            if key not in now and isinstance(last, SiteChanged):
                one = techniques.get(last.technique)
                reason = one.status if one is not None and one.state == "reverted" else "no longer proposed"
                now[key] = last if last.after == "OFF" else replace(last, before=last.after, after="OFF", reason=reason)
        if tuning is not None and (tuning.results or tuning.is_settled) and is_held(tuning, report):
            for name, result in tuning.results.items():
                now[name] = TrialDecided(**vars(result), setup_s=tuning.setup_s.get(name))
            now[PlanHeld] = PlanHeld(
                choices=dict(tuning.choices), whole=tuning.whole, is_settled=tuning.is_settled, step=settled_step
            )
        told, self._told = self._told, now
        return [event for key, event in now.items() if told.get(key) != event]
