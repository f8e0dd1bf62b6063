"""The protocol of a technique: what the engine calls, and what a technique answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.techniques.technique_context import TechniqueContext, Verdict, Verdicts, tried_at_first_calls
from lightning_accel.techniques.technique_events import Event

if TYPE_CHECKING:
    from torch.fx import GraphModule


@dataclass(frozen=True)
class OomFallback:
    """A way to need less memory that changes no number, and can be put on in mid-run."""

    settings: Any  # the technique's own, with which it is made anew
    costs: float  # what it adds to the time of a step, as a share of it, about: what costs least is tried first
    # What is left of the activations that a step keeps, as a share of them, about; None where it hangs on their values.
    keeps: float | None = None
    only_anew: str = ""  # why a run under way cannot have it, though the next one can; empty: it can


@dataclass
class BuildContext:
    """What a technique is made for, and what the others of the same run have for it.

    Attributes:
        model: What the techniques will be applied to.
        host: The machine.
        device: Where the model will compute, though it may not be there yet.
        verify: Whether changes are tried.
        settings: The settings of every technique, by its name; also of those that are off.
        techniques: Those of the run, in their order; complete once all are made.
        graph_edits: Called with every graph that was captured for a compiler.
        eager: The sites of modules that act only outside of compiled code, with what would be lost.
        dtype: In which a step computes.
    """

    model: nn.Module
    host: Host
    device: torch.device
    verify: bool
    settings: Mapping[str, Any]
    techniques: list[Technique] = field(default_factory=list)
    graph_edits: list[Callable[[GraphModule], None]] = field(default_factory=list)
    eager: dict[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def protected(self) -> dict[str, str]:
        """Where activations must not be changed, for the sake of any technique: prefixes of sites → why."""
        return {prefix: why for technique in self.techniques for prefix, why in technique.run.protects.items()}

    def edit_captured(self, graph: GraphModule) -> None:
        """Edits, in place, a graph that was captured for a compiler."""
        for edit in self.graph_edits:
            edit(graph)


@dataclass(frozen=True)
class LoaderTerms:
    """On which terms a loader of a training may be changed."""

    why_not: str = ""  # empty: it may be
    has_one_epoch: bool = False  # whether the run is over after one: nothing can be learned from one for the next
    objection: Callable[[], str] = str  # why not, asked when it is iterated, and more is known
    processes: int = 1  # how many of the run's share this machine's cores
    pins: bool = False  # whether nobody else brings its batches into pinned memory


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The facts about a technique that hold for every run.

    Attributes:
        applied_before_trial: Whether patches act from the start (and are undone if the trial refuses them), or
            wait for the trial's verdict.
        trial_step: Which step tries this technique: 0, or 1 for what must see the model as the others leave it; None:
            none does, and ranks need not agree on its sites once they are at work.
        trial_steps: What its trial takes, about, in steps of the run, where it has sites.
        remembers: Whether verdicts hold for later runs and travel in checkpoints. Not where they are cheap to
            find again and a changed program would make them wrong.
        acts_without_sites: Whether it acts though it edits no module (mixed precision does).
        alters_steps: Whether forward and loss may run otherwise with it than the user wrote them.
        is_part_of_training: Whether training is another one without it (preprocessing is), so that what it raises ends
            the run; others are taken back, and say why, where they raise on meeting what they do not know.
        edits_optimizers: Whether optimizers are sites of its, which come only after the model's.
        not_on: Kinds of hosts on which it cannot work at all → why, with the mend.
        why_not_sharded: Why it cannot act on a module whose parameters are sharded over processes; empty: it can.
        lacks: Says what is missing in this very process, an optional package perhaps, with the mend.
        conflicts: Takes its settings, those of all, and whether changes are tried; raises a ``ValueError`` where its
            settings contradict another's. Not called where it is off.
        oom_fallbacks: Takes its settings and the context; what it can do where a step has run out of memory, beyond
            what the settings have it do already.
    """

    applied_before_trial: bool = False
    trial_step: Literal[0, 1] | None = 0
    trial_steps: float = 0.0
    remembers: bool = True
    acts_without_sites: bool = False
    alters_steps: bool = True
    is_part_of_training: bool = False
    edits_optimizers: bool = False
    not_on: Mapping[str, str] = field(default_factory=dict)
    why_not_sharded: str = ""
    lacks: Callable[[Host], str | None] = lambda host: None
    conflicts: Callable[[Any, Mapping[str, Any], bool], None] = lambda settings, all_settings, verify: None
    oom_fallbacks: Callable[[Any, BuildContext], Iterable[OomFallback]] = lambda settings, context: ()


class Technique:
    """One way to go faster or smaller. The defaults do nothing; an implementation overrides what it needs.

    The engine calls, in this order: :meth:`unavailable`, :meth:`sites`, :meth:`optimizer_sites`, then at every step
    :meth:`step` and :meth:`batch`. During the technique's trial step, :meth:`trial` is entered around the user's own
    forward pass; what it yields decides, site by site, which patches stay. Applying, agreement of ranks, live trials,
    the report, resuming and undoing are the engine's.

    Attributes:
        name: As it is registered.
        traits: What holds for every run.
    """

    name: ClassVar[str]
    traits: Traits = Traits()

    def __init__(self, settings: Any, context: BuildContext) -> None: ...

    @cached_property
    def run(self) -> TechniqueContext:
        """What the run gives to it, and what it tells the run."""
        return TechniqueContext()

    @classmethod
    def from_settings(cls, settings: Any, context: BuildContext) -> Self | None:
        """The technique as a plan asks for it, and never for what is off; None: another one does its work."""
        return cls(settings, context)

    def unavailable(self, host: Host) -> str | None:
        """Why this cannot work on ``host`` at all, with the mend; None when it can."""
        return self.traits.not_on.get(host.kind)

    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        """Every site the technique looked at: the edit it proposes there, or why it proposes none.

        A :class:`Site` says all of that; a patch of another class is a site with an edit of its own making.

        Raises:
            ValueError: The settings name something that the model does not have.
        """
        return ()

    def optimizer_sites(self, optimizers: Mapping[str, Optimizer]) -> Iterable[Patch]:
        """The edits it proposes to optimizers that train the model, or why none; they are in force at once.

        Called before the first step: with those that the run was given, and once more with others that are then found
        to hold the model's parameters.

        Args:
            optimizers: By the site of each: ``"optimizer 0"``, ``"optimizer 1"``, in the order of their coming.
        """
        return ()

    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        """Entered around the forward pass of the trial step; the verdicts are read after it is left.

        By default each patch is tried as ``run.trials`` says, or kept where there are none.
        A patch without a verdict is kept only if it was applied before the trial.
        """
        if not self.run.trials:
            return nullcontext({patch.site: Verdict("kept") for patch in patches})
        return tried_at_first_calls({patch.site: self.run.trials[patch.site] for patch in patches})

    def step(self, stage: str) -> AbstractContextManager[Any]:
        """Around forward and loss of every step of a stage: ``"train"``, ``"validate"``, ``"test"``, ``"predict"``."""
        return nullcontext()

    def batch(self, batch: Any, stage: str) -> Any:
        """Applied to every batch of a stage once it is on the device."""
        return batch

    def loader(self, loader: Any, terms: LoaderTerms) -> Any:
        """What a Trainer iterates over in the place of a loader of its training; asked before the first epoch."""
        return loader

    def on(self, event: Event) -> None:
        """Called when something has happened: see :mod:`lightning_accel.techniques.technique_events`."""
