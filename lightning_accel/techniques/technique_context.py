"""What a run and a technique have to do with each other: verdicts on its sites, lines for the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import torch
from torch import nn
from typing_extensions import Self

from lightning_accel.core.measured import Measurement
from lightning_accel.core.patch import MethodPatch, PatchSet, applied
from lightning_accel.core.purse import Purse
from lightning_accel.core.ranks import has_ranks
from lightning_accel.core.states import VerdictKind
from lightning_accel.techniques.arms import Live


@dataclass(frozen=True)
class Verdict:
    """What was decided about one site.

    Attributes:
        kind: ``"kept"``, or why not: ``"refused"`` for its numbers or its time, ``"failed"`` with an error,
            ``"untried"`` as nothing called it, ``"too_dear"`` for this run to try to the end.
        reason: What was measured, or why the site is not changed.
        choices: What the technique decided for each kind of call.
        measured: The figures of ``reason``; None if nothing was measured.
    """

    kind: VerdictKind
    reason: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    measured: Measurement | None = None

    @property
    def keep(self) -> bool:
        """Whether the patch stays."""
        return self.kind == "kept"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints and JSON."""
        return {**asdict(self), "measured": None if self.measured is None else self.measured.to_dict()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """The verdict of which :meth:`to_dict` gave the values.

        Raises:
            KeyError, TypeError, ValueError: The values are not those of a verdict.
        """
        measured = state["measured"]
        if state["kind"] not in get_args(VerdictKind):
            raise ValueError(f"{state['kind']!r} is no kind of verdict")
        return cls(**{**state, "measured": None if measured is None else Measurement.from_dict(measured)})


Verdicts = dict[str, Verdict]
"""Site → verdict."""


@dataclass(frozen=True)
class SiteTrial:
    """How a patch is tried: at the first call of a module in the trial step, on what the user's code calls it with."""

    module: nn.Module
    judge: Callable[[Any, Any], Verdict]  # takes the arguments of the call
    when: Callable[[], bool] = lambda: True  # whether a call is one to try
    unseen: str = ""  # why the patch is refused where there is no such call; empty: it gets no verdict


@contextmanager
def tried_at_first_calls(trials: Mapping[str, SiteTrial]) -> Iterator[Verdicts]:
    """Entered around the forward pass of a step; yields the verdicts, which are complete once it is left."""
    verdicts: Verdicts = {site: Verdict("untried", trial.unseen) for site, trial in trials.items() if trial.unseen}
    with applied(PatchSet(_probe(site, trial, verdicts) for site, trial in trials.items())):
        yield verdicts


def _probe(site: str, trial: SiteTrial, verdicts: Verdicts) -> MethodPatch:
    """Intercepts one call of the module, not of its copies, then undoes itself. The trial leaves what runs after it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not trial.module or not patch.is_applied or not trial.when():
                return original(self, *args, **kwargs)
            patch.undo()
            verdicts[site] = trial.judge(args, kwargs)
            return self.forward(*args, **kwargs)

        return forward

    patch = MethodPatch(site, "trial", trial.module, "forward", wrap)
    return patch


@dataclass(frozen=True)
class Forecast:
    """What a technique will do on a host, as far as it can be told before a run."""

    acts: bool  # whether it acts there, or is tried
    brief: str  # in a word or two: "tried", "yes", "no", the names of kernels that are tried
    words: str  # what is done, or why not, with the mend
    is_missed: bool = True  # whether somebody who has this host may miss it: not what is for other hosts only


@dataclass(eq=False)
class TechniqueContext:
    """What a run gives to one technique, and what the technique tells the run, which acts on it after the step.

    Attributes:
        on_by_default: Whether plans have it without being asked for it: on a host that it is not for, the report says
            so and nobody is warned.
        explicit: Whether the user asked for it by name, so that finding nothing to do is worth a warning.
        verify: Whether changes are tried; else they hold from the start.
        timed: Whether the run may decide by times; two runs of one seed are then not the same to the bit.
        agree: Maps a value of this process to that of rank 0, called on every rank alike; None with one process.
        purse: What the run may pay for trials; None: whatever they take.
        status: One line for the report; if it is empty, the report counts the sites.
        details: What the full report says below the status; it may have several lines.
        measured: What was measured of the technique as a whole; None if nothing was.
        spoilt: How the current step differs from the user's own; empty if it does not. A run that can repeat the step
            repeats it without the technique.
        trials: By site, how patches are tried, where :meth:`Technique.trial` is not overridden.
        live: How live trials switch it; None if they leave it alone, as what the user asked for by name.
        watches_on: Whether it goes on watching the model where all its edits were refused, to try others later.
        forecast: What it will do on the host, whatever the model; None: that is for its sites to say.
        protects: Where activations must not be changed, for its sake: prefixes of sites → why.
        setup_s: What it takes to be had on its sites, beside its trial, in seconds, about.
        at_end: What is neither a patch nor a context, and is released when the run is over.
        is_new: Whether something was said on which nobody has acted yet.
    """

    on_by_default: bool = False
    explicit: bool = False
    verify: bool = True
    timed: bool = True
    agree: Callable[[Any], Any] | None = None
    purse: Purse | None = None
    status: str = ""
    details: str = ""
    measured: Measurement | None = None
    spoilt: str = ""
    trials: dict[str, SiteTrial] = field(default_factory=dict)
    live: Live | None = None
    watches_on: bool = False
    forecast: Forecast | None = None
    protects: Mapping[str, str] = field(default_factory=dict)
    setup_s: float = 0.0
    at_end: ExitStack = field(default_factory=ExitStack)
    is_new: bool = False
    _refused: Verdicts = field(default_factory=dict, init=False)
    _revised: Verdicts = field(default_factory=dict, init=False)
    _warnings: list[str] = field(default_factory=list, init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("status", "details", "measured") and value != getattr(self, name):
            self.is_new = True
        super().__setattr__(name, value)

    def refuse(self, site: str, why: str, measured: Measurement | None = None, kind: VerdictKind = "refused") -> None:
        """Has the patch at ``site`` undone, here and in resumed runs."""
        self._refused[site] = Verdict(kind, why, measured=measured)
        self.is_new = True

    def revise(self, site: str, verdict: Verdict) -> None:
        """Reports that the technique itself has changed what it does at ``site``, and that ``verdict`` now holds."""
        self._revised[site] = verdict
        self.is_new = True

    def warn(self, message: str) -> None:
        """Warns once that something that was asked for is not done; with ``strict``, raises an error."""
        if message not in self._warned:
            self._warned.add(message)
            self._warnings.append(message)
            self.is_new = True

    @property
    def decides_by_clock(self) -> bool:
        """Whether times may decide: a deterministic run goes by none either."""
        return self.timed and not torch.are_deterministic_algorithms_enabled()

    @property
    def decides_alone(self) -> bool:
        """Whether several processes train and do not agree: each would choose by its own clock."""
        return self.agree is None and has_ranks()

    def take(self) -> tuple[Verdicts, Verdicts, list[str]]:
        """Returns what was refused, revised and warned of since the last call."""
        taken = self._refused, self._revised, self._warnings
        self._refused, self._revised, self._warnings, self.is_new = {}, {}, [], False
        return taken
