"""The state that a run leaves to the next run of the same module and to its checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_accel.technique_run import Decisions
from lightning_accel.techniques.technique_context import Verdict
from lightning_accel.tuning.tuning_result import Tuning


@dataclass
class RunState:
    """Results of earlier runs of a module.

    Attributes:
        decisions: The verdicts on its sites, from steps with gradients.
        decisions_without_gradients: Those from steps without gradients, which do not hold for the others.
        tuning: The settled results of the live trials.
        put_on: The techniques put on after a lack of memory: names and settings.
    """

    decisions: Decisions = field(default_factory=dict)
    decisions_without_gradients: Decisions = field(default_factory=dict)
    tuning: Tuning | None = None
    put_on: list[tuple[str, Any]] = field(default_factory=list)
    _module: weakref.ref[nn.Module] | None = None

    @property
    def is_decided(self) -> bool:
        """Whether an earlier run of the module, or the checkpoint from which this run resumes, has decided."""
        return self.tuning is not None or bool(self.decisions or self.put_on)

    def be_of(self, module: nn.Module) -> None:
        """Forgets everything if the state belongs to another module."""
        if self._module is None or self._module() is not module:
            vars(self).update(vars(RunState()))
            self._module = weakref.ref(module)

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as plain values, for a checkpoint, without empty entries."""
        found = {
            "decisions": {
                technique: {site: verdict.to_dict() for site, verdict in verdicts.items()}
                for technique, verdicts in self.decisions.items()
            },
            "out_of_memory": self.put_on,
            "tuning": None if self.tuning is None else self.tuning.to_dict(),
        }
        return {name: value for name, value in found.items() if value}

    def load(self, state: Mapping[str, Any]) -> Decisions:
        """Loads a state of :meth:`to_dict`. Returns its decisions, which a run in progress must carry out."""
        self.put_on = [(name, settings) for name, settings in state.get("out_of_memory", ())]
        if "tuning" in state:
            self.tuning = Tuning.from_dict(state["tuning"])
        return {
            technique: {site: Verdict.from_dict(one) for site, one in verdicts.items()}
            for technique, verdicts in state.get("decisions", {}).items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": None}  # a copy or another process does not have this module
