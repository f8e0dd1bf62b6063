"""The protocol of a technique: what it may fill in, and when each part is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch import nn

from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch, PatchSet


@dataclass(frozen=True)
class Refusal:
    """A site that a technique looked at and leaves alone, with the reason in words a user can act on."""

    site: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """What a trial found at one site. Plain values: it travels from rank 0 to the others, and into a checkpoint.

    Attributes:
        keep: Whether the change stays.
        reason: Why not (or, for a kept change, what was measured: ``"1.31x faster here"``).
        choices: What was chosen, where there is more to choose than to keep or not: by the kind of call.
    """

    keep: bool
    reason: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)


Verdicts = dict[str, Verdict]


class Technique:
    """One way to go faster or smaller. The defaults do nothing; an implementation overrides what it needs.

    The engine calls, in this order: :meth:`unavailable`, :meth:`patches`, then at every step :meth:`step` and
    :meth:`batch`. During the technique's trial step, :meth:`trial` is entered around the user's own forward pass;
    what it yields decides, site by site, which patches stay.

    Attributes:
        name: As in the plan and the report.
        applied_before_trial: Whether patches act from the start (and are undone if the trial refuses them), or
            wait for the trial's verdict.
        trial_step: Which step tries this technique: 0, or 1 for what must see the model as the others leave it; None:
            none does, and ranks need not agree on its sites once they are at work.
        remembers: Whether verdicts hold for later runs and travel in checkpoints. Not where they are cheap to
            find again and a changed program would make them wrong.
        acts_without_sites: Whether it acts though it edits no module (mixed precision does).
        watches_on: Whether it goes on watching the model where all its edits were refused, to try others later.
        why_not_sharded: Why it cannot act on a module whose parameters are sharded over processes; empty: it can.
        on_by_default: Whether plans have it without being asked for it: on a host that it is not for, the report says
            so and nobody is warned.
        explicit: Whether the user asked for it by name, so that finding nothing to do is worth a warning.
        status: One line for the report; empty: the engine counts the sites.
        objections: Site → why its patch must be taken back, for what a technique notices after its trial.
        revisions: Site → what now holds there by the technique's own doing, for the report and for later runs.
        complaints: What it was asked for and cannot do after all, each said once.
        details: What the full report says below its status, several lines perhaps.
        agree: Maps a value of this process to that of rank 0, called on every rank alike; None with one process.
    """

    name: ClassVar[str]
    applied_before_trial: bool = False
    trial_step: ClassVar[Literal[0, 1] | None] = 0
    remembers: ClassVar[bool] = True
    acts_without_sites: ClassVar[bool] = False
    watches_on: bool = False
    why_not_sharded: ClassVar[str] = ""
    on_by_default: bool = False
    explicit: bool = False
    status: str = ""
    objections: Mapping[str, str] = MappingProxyType({})
    revisions: Mapping[str, Verdict] = MappingProxyType({})
    complaints: tuple[str, ...] = ()
    details: str = ""
    agree: Callable[[Any], Any] | None = None

    def unavailable(self, host: Host) -> str | None:
        """Why this cannot work on ``host`` at all, with the mend; None when it can."""
        return None

    def patches(self, model: nn.Module, host: Host) -> Iterable[Patch | Refusal]:
        """Every site the technique looked at: the edit it proposes there, or why it proposes none.

        Raises:
            ValueError: The settings name something that the model does not have.
        """
        return ()

    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        """Entered around the forward pass of the trial step; the verdicts are read after it is left.

        A patch without a verdict is kept only if it was applied before the trial.
        """
        return _no_trial(patches)

    def step(self, stage: str) -> AbstractContextManager[Any]:
        """Around forward and loss of every step of a stage: ``"train"``, ``"validate"``, ``"test"``, ``"predict"``."""
        return nullcontext()

    def batch(self, batch: Any, stage: str) -> Any:
        """Applied to every batch of a stage once it is on the device."""
        return batch

    def predictions(self, outputs: Any) -> Any:
        """Applied to what a predict step returns, which the user's code keeps."""
        return outputs

    def decided(self, verdicts: Verdicts) -> None:
        """Called with the verdicts that hold, of a trial or an earlier run, before patches follow them."""

    def settled(self) -> None:
        """Called after patches of this technique were applied or taken back in mid-run."""

    def close(self) -> None:
        """Releases what is neither a patch nor a context."""


@contextmanager
def _no_trial(patches: PatchSet) -> Iterator[Verdicts]:
    yield {patch.site: Verdict(keep=True) for patch in patches}
