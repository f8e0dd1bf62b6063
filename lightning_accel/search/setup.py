"""The setup of one run on trial: its differences from what the user has written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrialSetup:
    """Changes to a run that is about to begin."""

    batch_size: int | None = None  # samples in a batch; None: unchanged
    accumulate: int | None = None  # batches in an optimizer step; None: unchanged
    loader: Mapping[str, Any] = field(default_factory=dict)  # arguments of the training's `DataLoader`
    plan: Mapping[str, Any] = field(default_factory=dict)  # techniques of the run's `AccelPlugin`
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that must be set before Python starts

    def with_(self, other: TrialSetup) -> TrialSetup:
        """Combines both changes; the other's win where both set the same."""
        return TrialSetup(
            batch_size=self.batch_size if other.batch_size is None else other.batch_size,
            accumulate=self.accumulate if other.accumulate is None else other.accumulate,
            loader={**self.loader, **other.loader},
            plan={**self.plan, **other.plan},
            environment={**self.environment, **other.environment},
        )

    @property
    def key(self) -> str:
        """Returns a text that is equal for equal setups, in every process."""
        return json.dumps(asdict(self), sort_keys=True)

    def __str__(self) -> str:
        named: dict[str, Any] = {"batch_size": self.batch_size, "accumulate_grad_batches": self.accumulate}
        given = {name: value for name, value in named.items() if value is not None}
        given |= {**self.loader, **self.plan, **self.environment}
        return ", ".join(f"{name}={value}" for name, value in given.items()) or "as it is"
