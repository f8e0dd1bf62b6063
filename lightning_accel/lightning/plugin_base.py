"""The base of all plugins: their plan and the reports of their runs."""

from __future__ import annotations

from typing import Any

import yaml
from typing_extensions import Self

from lightning_accel.arguments import Arguments
from lightning_accel.core.report import Report
from lightning_accel.settings import Plan


class Reports:
    """The reports of the last runs, shared by a plugin and its copies, since libraries copy the plugins they are given.

    Another process, to which it is pickled, has its own.

    Attributes:
        fit: The report of the current or the last fit; None if there was none.
        evaluation: The report of the current or the last evaluation; None if there was none.
        running: The report of the current or the last run of either kind.
    """

    def __init__(self) -> None:
        self.fit: Report | None = None
        self.evaluation: Report | None = None
        self.running = Report()

    def begin(self, report: Report, *, is_fitting: bool) -> None:
        """Stores the report of a run that starts."""
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
        """Makes the plugin for an existing plan."""
        return cls(**vars(plan))

    @property
    def report(self) -> Report:
        """Returns the report of the current or the last fit: changes, their sites, and why others stay unchanged.

        Copies share it. Evaluations do not change it. Before the first fit, it is that of the last evaluation.
        """
        return self._reports.fit or self._reports.running

    @property
    def evaluation_report(self) -> Report:
        """Returns the report of the current or the last validation, test or prediction outside of a fit."""
        return self._reports.evaluation or Report()

    def note(self, line: str) -> None:
        """Adds a line to the report of the current run."""
        self._reports.running.note(line)

    def __repr__(self) -> str:
        """Returns the expression that makes the plugin."""
        given = {"precision": self.plan.precision, **self.plan.given()}
        return f"{type(self).__name__}({', '.join(f'{setting}={value!r}' for setting, value in given.items())})"


def _in_yaml(dumper: yaml.Dumper, plugin: PluginBase) -> yaml.Node:
    """Represents a plugin as Lightning's command line does. Some loggers write a Trainer's arguments in each fit."""
    kind = type(plugin)
    given = plugin.plan.to_dict(whole=False)
    return dumper.represent_data({"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": given})


yaml.add_multi_representer(PluginBase, _in_yaml)
