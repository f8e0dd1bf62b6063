"""The results of live trials: the current choices, all comparisons, and their texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_accel.core.report import TechniqueReport
from lightning_accel.core.text_columns import aligned
from lightning_accel.tuning.comparison import Result

WHOLE = "whole plan"  # the name of the comparison of the whole plan with the plain run


@dataclass
class Tuning:
    """The results of live trials, for the report, the checkpoint and the cache."""

    choices: dict[str, str] = field(default_factory=dict)  # the current choices: arm → choice
    results: dict[str, Result] = field(default_factory=dict)  # the result of each comparison, by its name
    whole: Result | None = None  # the latest comparison of the current choices with the plain run
    is_settled: bool = False  # whether all decisions are made
    is_earlier: bool = False  # whether an earlier run has measured `whole`, and no audit of this run has replaced it
    setup_s: dict[str, float] = field(default_factory=dict)  # seconds of setup, by the names of arms that need one
    gain_s: dict[str, float] = field(default_factory=dict)  # seconds that such an arm saves in a turn
    of_turns: float = 0.0  # the length, in turns, of the run that settled it

    @property
    def is_proven(self) -> bool:
        """Whether the current choices were shown to be faster than the plain run."""
        return bool(self.choices) and self.whole is not None and self.whole.is_won

    @property
    def is_proven_as_a_whole(self) -> bool:
        """Whether it was the current choices, and no others, that were shown to be faster."""
        return self.is_proven and self.whole is not None and self.whole.candidate == self.choices

    @property
    def gain(self) -> float:
        """Returns the estimated speed with the current choices, as a multiple of the plain run's."""
        return max(1.0, self.whole.interval.ratio) if self.whole is not None and self.choices else 1.0

    @property
    def sure_gain(self) -> float:
        """Returns the lower bound of that speed."""
        return max(1.0, self.whole.interval.low) if self.whole is not None and self.is_proven else 1.0

    def gain_of(self, name: str) -> float:
        """Returns the factor by which an arm was measured to make steps faster, alone or with the plan; else 1.0."""
        own = self.results.get(name)
        if name not in self.choices:
            return 1.0
        if own is None:
            return self.gain if self.is_proven_as_a_whole else 1.0
        return max(1.0, own.interval.ratio) if own.is_won or self.is_proven_as_a_whole else 1.0

    def is_open_for(self, turns: float) -> bool:
        """Returns whether nothing was chosen so far and a run of so many turns can afford more trials."""
        return not self.choices and turns >= 2 * self.of_turns

    def is_nothing_for(self, turns: float) -> bool:
        """Returns whether a run of so many turns need not look for anything that is faster than the plain run."""
        return self.is_settled and not (self.choices or self.is_open_for(turns))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for checkpoints and JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Tuning:
        """Makes the object from the values of :meth:`to_dict`.

        Raises:
            KeyError, TypeError: The state has another form.
        """
        whole = state["whole"]
        results = {name: Result.from_dict(one) for name, one in state["results"].items()}
        whole = None if whole is None else Result.from_dict(whole)
        return cls(**{**deepcopy(state), "results": results, "whole": whole})

    def show_in(self, record: TechniqueReport) -> None:
        """Writes the results to a record of the report."""
        record.is_on, record.status, record.details = bool(self.choices), self.line(), self.table()
        record.data = self.to_dict()

    def pays_after(self, name: str) -> int | None:
        """Returns after how many turns an arm has recovered its setup time; None if the gain was never measured."""
        if name not in self.setup_s or self.gain_s.get(name, 0.0) <= 0:
            return None
        return math.ceil(self.setup_s[name] / self.gain_s[name])

    def table(self) -> str:
        """Returns a line for each comparison: the measured speed, the number of turns, and the verdict."""
        found = self.results.values()
        rows = ((r.name, f"{r.verdict}: {r.interval}, on {r.turns} steps{self._price(r.name)}") for r in found)
        return "\n".join(aligned(rows))

    def _price(self, name: str) -> str:
        if name not in self.setup_s:
            return ""
        turns = self.pays_after(name)
        return f"; {self.setup_s[name]:.1f} s to set up" + ("" if turns is None else f": pays after {turns:,} steps")

    def line(self) -> str:
        """Returns a one-line summary for the console."""
        if self.whole is None and not self.results:
            return "nothing was worth trying" if self.is_settled else "not tried: the run is too short"
        if self.whole is None or not self.choices:
            return "none of the options on trial was measurably faster; running without them"
        where = "steps of an earlier run" if self.is_earlier else "of your own steps"
        return f"{self.whole.interval} over plain, on {self.whole.turns} {where}"
