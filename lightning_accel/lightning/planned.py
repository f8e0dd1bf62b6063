"""What a plugin of either kind says of its plan and its run."""

from __future__ import annotations

from typing_extensions import Self

from lightning_accel.arguments import Arguments
from lightning_accel.core.report import Report
from lightning_accel.settings import Plan


class Planned(Arguments):
    """A plugin that takes the settings of a plan.

    Attributes:
        plan: The settings.
    """

    plan: Plan
    _report: Report

    @classmethod
    def from_plan(cls, plan: Plan) -> Self:
        """The plugin for a plan made elsewhere."""
        return cls(**vars(plan))

    @property
    def report(self) -> Report:
        """What was done in the current or the last run, where, and why not elsewhere."""
        return self._report

    def __repr__(self) -> str:
        """As it would be written: with the settings that are not the default ones."""
        defaults = vars(Plan())
        given = {n: value for n, value in vars(self.plan).items() if n == "precision" or value != defaults[n]}
        return f"{type(self).__name__}({', '.join(f'{setting}={value!r}' for setting, value in given.items())})"
