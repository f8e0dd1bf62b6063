"""What a plugin of either kind says of its plan and its run."""

from __future__ import annotations

from typing import Any

import yaml
from typing_extensions import Self

from lightning_accel.arguments import Arguments
from lightning_accel.core.report import Report
from lightning_accel.settings import Plan


class Reports:
    """The reports of the last runs: the same for a plugin and its copies, as libraries copy what they are given.

    Another process, to which it is pickled, has its own.

    Attributes:
        fit: Of the current or the last fit; None: there was none.
        evaluation: Of the current or the last evaluation.
        running: Of the current or the last run, whichever it is.
    """

    def __init__(self) -> None:
        self.fit: Report | None = None
        self.evaluation: Report | None = None
        self.running = Report()

    def begin(self, report: Report, *, is_fitting: bool) -> None:
        """Told of a run that starts, with its report."""
        self.running = report
        setattr(self, "fit" if is_fitting else "evaluation", report)

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class PluginBase(Arguments):
    """A plugin that takes the settings of a plan.

    Attributes:
        plan: The settings.
    """

    plan: Plan
    _reports: Reports

    @classmethod
    def from_plan(cls, plan: Plan) -> Self:
        """The plugin for a plan made elsewhere."""
        return cls(**vars(plan))

    @property
    def report(self) -> Report:
        """What was done in the current or the last fit, where, and why not elsewhere, with this plugin or a copy of it.

        Evaluations leave it as it is. Before the first fit it is that of the last evaluation.
        """
        return self._reports.fit or self._reports.running

    @property
    def evaluation_report(self) -> Report:
        """The same of the current or the last validation, test or prediction that was no part of a fit."""
        return self._reports.evaluation or Report()

    def note(self, line: str) -> None:
        """Adds a line to the report of the run that is under way."""
        self._reports.running.note(line)

    def __repr__(self) -> str:
        """As it would be written."""
        given = {"precision": self.plan.precision, **self.plan.given()}
        return f"{type(self).__name__}({', '.join(f'{setting}={value!r}' for setting, value in given.items())})"


def _in_yaml(dumper: yaml.Dumper, plugin: PluginBase) -> yaml.Node:
    """As Lightning's command line has it. Libraries have loggers write what a Trainer was given, for every fit."""
    kind = type(plugin)
    given = plugin.plan.to_dict(whole=False)
    return dumper.represent_data({"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": given})


yaml.add_multi_representer(PluginBase, _in_yaml)
