"""What a run leaves to the next run of the same module, and to its checkpoint."""

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
    """What runs have found out about a module.

    Attributes:
        decisions: On its sites, in steps with gradients.
        decisions_without_gradients: In steps without; they do not hold for the others.
        tuning: What the live trials have settled.
        put_on: Against a lack of memory: names and settings.
    """

    decisions: Decisions = field(default_factory=dict)
    decisions_without_gradients: Decisions = field(default_factory=dict)
    tuning: Tuning | None = None
    put_on: list[tuple[str, Any]] = field(default_factory=list)
    _module: weakref.ref[nn.Module] | None = None

    def be_of(self, module: nn.Module) -> None:
        """Forgets everything if it is about another module."""
        if self._module is None or self._module() is not module:
            vars(self).update(vars(RunState()))
            self._module = weakref.ref(module)

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values, for a checkpoint, without empty entries."""
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
        """Takes a state of :meth:`to_dict` over. Returns its decisions, which a run in progress has to carry out."""
        self.put_on = [(name, settings) for name, settings in state.get("out_of_memory", ())]
        if "tuning" in state:
            self.tuning = Tuning.from_dict(state["tuning"])
        return {
            technique: {site: Verdict.from_dict(one) for site, one in verdicts.items()}
            for technique, verdicts in state.get("decisions", {}).items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": None}  # which a copy, or another process, does not have
