"""The protocol of a technique: what the engine calls, and what a technique answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.purse import Purse
from lightning_accel.techniques.arms import Arm
from lightning_accel.techniques.notes import Notes, Verdict, Verdicts

if TYPE_CHECKING:
    from torch.fx import GraphModule


@dataclass(frozen=True)
class Refusal:
    """A site that a technique looked at and left alone.

    Attributes:
        site: The qualified name of the module; ``""`` for the model itself.
        reason: Why.
    """

    site: str
    reason: str


@dataclass(frozen=True)
class Forecast:
    """What a technique will do on a host, as far as it can be told before a run."""

    acts: bool  # whether it acts there, or is tried
    brief: str  # in a word or two: "tried", "yes", "no", the names of kernels that are tried
    words: str  # what is done, or why not, with the mend
    is_missed: bool = True  # whether somebody who has this host may miss it: not what is for other hosts only


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
    """

    model: nn.Module
    host: Host
    device: torch.device
    verify: bool
    settings: Mapping[str, Any]
    techniques: list[Technique] = field(default_factory=list)

    def protected(self) -> dict[str, str]:
        """Where activations must not be changed, for the sake of any technique: prefixes of sites → why."""
        return {prefix: why for technique in self.techniques for prefix, why in technique.protects(self.model).items()}

    def edit_captured(self, graph: GraphModule) -> None:
        """Has every technique edit a graph that was captured for a compiler."""
        for technique in self.techniques:
            technique.edit_captured(graph)

    def dtype(self) -> torch.dtype:
        """In which a step computes."""
        return next((found for technique in self.techniques if (found := technique.dtype) is not None), torch.float32)


@dataclass(frozen=True)
class LoaderTerms:
    """On which terms a loader of a training may be changed."""

    why_not: str = ""  # empty: it may be
    has_one_epoch: bool = False  # whether the run is over after one: nothing can be learned from one for the next
    objection: Callable[[], str] = str  # why not, asked when it is iterated, and more is known
    processes: int = 1  # how many of the run's share this machine's cores
    pins: bool = False  # whether nobody else brings its batches into pinned memory


class Technique:
    """One way to go faster or smaller. The defaults do nothing; an implementation overrides what it needs.

    The engine calls, in this order: :meth:`unavailable`, :meth:`patches`, :meth:`optimizers`, then at every step
    :meth:`step` and :meth:`batch`. During the technique's trial step, :meth:`trial` is entered around the user's own
    forward pass; what it yields decides, site by site, which patches stay.

    Attributes:
        name: As it is registered.
        applied_before_trial: Whether patches act from the start (and are undone if the trial refuses them), or
            wait for the trial's verdict.
        trial_step: Which step tries this technique: 0, or 1 for what must see the model as the others leave it; None:
            none does, and ranks need not agree on its sites once they are at work.
        trial_steps: What its trial takes, about, in steps of the run, where it has sites.
        remembers: Whether verdicts hold for later runs and travel in checkpoints. Not where they are cheap to
            find again and a changed program would make them wrong.
        acts_without_sites: Whether it acts though it edits no module (mixed precision does).
        alters_steps: Whether forward and loss may run otherwise with it than the user wrote them; not where it acts on
            the process alone.
        watches_on: Whether it goes on watching the model where all its edits were refused, to try others later.
        is_part_of_training: Whether training is another one without it (preprocessing is), so that what it raises ends
            the run; others are taken back, and say why, where they raise on meeting what they do not know.
        edits_optimizers: Whether optimizers are sites of its, which come only after the model's.
        not_on: Kinds of hosts on which it cannot work at all → why, with the mend.
        why_not_sharded: Why it cannot act on a module whose parameters are sharded over processes; empty: it can.
        dtype: In which it has steps compute; None: it has no say in that.
        on_by_default: Whether plans have it without being asked for it: on a host that it is not for, the report says
            so and nobody is warned.
        explicit: Whether the user asked for it by name, so that finding nothing to do is worth a warning.
        timed: Whether the run may decide by times; two runs of one seed are then not the same to the bit.
        agree: Maps a value of this process to that of rank 0, called on every rank alike; None with one process.
        purse: What the run may pay for trials; None: whatever they take.
    """

    name: ClassVar[str]
    applied_before_trial: bool = False
    trial_step: ClassVar[Literal[0, 1] | None] = 0
    trial_steps: ClassVar[float] = 0.0
    remembers: ClassVar[bool] = True
    acts_without_sites: ClassVar[bool] = False
    alters_steps: ClassVar[bool] = True
    watches_on: bool = False
    is_part_of_training: ClassVar[bool] = False
    edits_optimizers: ClassVar[bool] = False
    not_on: ClassVar[Mapping[str, str]] = {}
    why_not_sharded: ClassVar[str] = ""
    dtype: torch.dtype | None = None
    on_by_default: bool = False
    explicit: bool = False
    timed: bool = True
    agree: Callable[[Any], Any] | None = None
    purse: Purse | None = None

    @property
    def setup_s(self) -> float:
        """What it takes to be had on its sites, beside its trial, in seconds, about."""
        return 0.0

    @classmethod
    def from_settings(cls, settings: Any, context: BuildContext) -> Self | None:
        """The technique as a plan asks for it, and never for what is off; None: another one does its work."""
        return cls()

    @classmethod
    def check(cls, settings: Any, all_settings: Mapping[str, Any], verify: bool) -> None:
        """Raises a ``ValueError`` where settings contradict those of another technique; not called where it is off."""

    @classmethod
    def oom_fallbacks(cls, context: BuildContext) -> Iterable[OomFallback]:
        """What it can do where a step has run out of memory, beyond what the run's settings have it do already."""
        return ()

    @cached_property
    def notes(self) -> Notes:
        """What this technique has to say."""
        return Notes()

    @property
    def decides_by_clock(self) -> bool:
        """Whether times may decide: a deterministic run goes by none either."""
        return self.timed and not torch.are_deterministic_algorithms_enabled()

    @property
    def decides_alone(self) -> bool:
        """Whether several processes train and do not agree: each would choose by its own clock."""
        has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return has_ranks and self.agree is None

    def unavailable(self, host: Host) -> str | None:
        """Why this cannot work on ``host`` at all, with the mend; None when it can."""
        return self.not_on.get(host.kind)

    def patches(self, model: nn.Module, host: Host) -> Iterable[Patch | Refusal]:
        """Every site the technique looked at: the edit it proposes there, or why it proposes none.

        Raises:
            ValueError: The settings name something that the model does not have.
        """
        return ()

    def optimizers(self, optimizers: Mapping[str, Optimizer]) -> Iterable[Patch | Refusal]:
        """The edits it proposes to optimizers that train the model, or why none; they are in force at once.

        Called before the first step: with those that the run was given, and once more with others that are then found
        to hold the model's parameters.

        Args:
            optimizers: By the site of each: ``"optimizer 0"``, ``"optimizer 1"``, in the order of their coming.
        """
        return ()

    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        """Entered around the forward pass of the trial step; the verdicts are read after it is left.

        A patch without a verdict is kept only if it was applied before the trial.
        """
        return nullcontext({patch.site: Verdict("kept") for patch in patches})

    def step(self, stage: str) -> AbstractContextManager[Any]:
        """Around forward and loss of every step of a stage: ``"train"``, ``"validate"``, ``"test"``, ``"predict"``."""
        return nullcontext()

    def try_late(self, patches: PatchSet) -> None:
        """Has these patches tried in the steps to come: they were applied in mid-run, where there is little memory."""

    def batch(self, batch: Any, stage: str) -> Any:
        """Applied to every batch of a stage once it is on the device."""
        return batch

    def loader(self, loader: Any, terms: LoaderTerms) -> Any:
        """What a Trainer iterates over in the place of a loader of its training; asked before the first epoch."""
        return loader

    def decided(self, verdicts: Verdicts) -> None:
        """Called with the verdicts that hold, of a trial or an earlier run, before patches follow them."""

    def settled(self) -> None:
        """Called after patches of this technique were applied or taken back in mid-run."""

    def close(self) -> None:
        """Releases what is neither a patch nor a context."""

    def arms(self) -> Iterable[Arm]:
        """What live trials may switch between two steps; asked once the technique's own trial is over.

        Nothing for what the user asked for by name, nor for what changes training.
        """
        return ()

    def forecast(self, host: Host) -> Forecast | None:
        """What it will do on ``host``, whatever the model; None: that is for its sites to say."""
        return None

    def alternatives(self, host: Host) -> Sequence[str]:
        """Between what its trial chooses on ``host``, by name; empty: to keep an edit or not."""
        return ()

    # -- for other techniques of the run -----------------------------------------------------------------------

    def protects(self, model: nn.Module) -> Mapping[str, str]:
        """Where activations must not be changed, for the sake of this technique: prefixes of sites → why."""
        return {}

    def give_way(self, protected: Mapping[str, str]) -> None:
        """Called when a technique was put on in mid-run, with what it :meth:`protects`."""

    def edit_captured(self, graph: GraphModule) -> None:
        """Edits, in place, a graph that was captured for a compiler."""
