"""What trials and techniques decide in a fit, as events for its record."""

from __future__ import annotations

from dataclasses import replace

from lightning_accel.callbacks._announcements import report_of, tuning_of
from lightning_accel.core.states import SiteChanged
from lightning_accel.evidence.events import Decision, PlanHeld, TrialDecided
from lightning_accel.lightning.packages import Trainer


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
        if tuning is not None and (tuning.results or tuning.is_settled):
            for name, result in tuning.results.items():
                now[name] = TrialDecided(**vars(result), setup_s=tuning.setup_s.get(name))
            now[PlanHeld] = PlanHeld(
                choices=dict(tuning.choices), whole=tuning.whole, is_settled=tuning.is_settled, step=settled_step
            )
        told, self._told = self._told, now
        return [event for key, event in now.items() if told.get(key) != event]
