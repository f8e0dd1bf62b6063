"""Changes that let a failed step run again: one class for each fallback, tried in a fixed order.

After an out-of-memory error, an option on trial is reverted first. Then techniques that need less memory are put on,
one by one. After any other error, edits are reverted: first the likeliest technique, then an option on trial, then
everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accel.core.report import EditError, one_line
from lightning_accel.core.states import VerdictKind
from lightning_accel.engine import Engine
from lightning_accel.lightning.autocast_precision import AutocastPrecision
from lightning_accel.lightning.oom_recovery import OomRecovery
from lightning_accel.lightning.packages import LightningModule
from lightning_accel.lightning.step_outputs import StepOutputs
from lightning_accel.lightning.step_snapshot import Attempt


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that fallbacks read and change.

    ``revert`` takes a technique back for the rest of the run, with a reason and the kind of the verdict.
    ``revert_option_on_trial`` returns whether an option was on trial in the step that raised the error.
    """

    module: LightningModule
    engine: Engine
    precision: AutocastPrecision
    outputs: StepOutputs
    memory: OomRecovery
    is_in_force: Callable[[], bool]
    revert: Callable[[str, str, VerdictKind], None]
    revert_option_on_trial: Callable[[Exception], bool]
    end_trials: Callable[[], None]


@dataclass
class Failure:
    """A step that raised an error; ``trains`` says whether the step keeps activations for a backward pass."""

    attempt: Attempt
    error: Exception
    suspects: Sequence[str]
    lacks_memory: bool = False
    trains: bool = True

    @property
    def remark(self) -> str:
        """Returns the error in one line, for the report."""
        return f"a step raised {one_line(self.error)}"


class Fallback(ABC):
    """One change to a run after which a failed step may succeed.

    Attributes:
        is_last: Whether an error that the step raises after this fallback is the user's own.
    """

    is_last: ClassVar[bool] = False

    def __init__(self, failure: Failure, parts: RunParts) -> None:
        self._failure, self._parts = failure, parts

    @abstractmethod
    def prepare(self) -> bool:
        """Makes the change, after the step's effects were undone.

        Returns:
            False if there is nothing (left) to change. Then the next fallback follows.
        """

    def in_force(self) -> AbstractContextManager[None]:
        """Returns the context in which the step runs again."""
        return nullcontext()

    def succeeded(self) -> None:
        """Adds a note to the report after the step has succeeded. The default adds none."""
        return


class RevertSuspects(Fallback):
    """Reverts the suspected techniques, one after the other."""

    _names: list[str] | None = None  # the remaining suspects
    _certain: Collection[str] = ()  # techniques to revert even if they are not in force
    _reverted = ""

    @override
    def prepare(self) -> bool:
        error, parts = self._failure.error, self._parts
        if self._names is None:
            # The step may have failed on a tensor that an earlier turn left in another dtype or layout.
            self._certain = {*parts.outputs.mend(), *(self._failure.suspects if isinstance(error, EditError) else ())}
            self._names = list(dict.fromkeys([*self._certain, *self._failure.suspects]))
        while self._names:
            name = self._names.pop(0)
            if name in self._certain or self._is_in_force(name):
                self._reverted = name
                if isinstance(error, EditError):
                    parts.revert(name, str(error), "refused")
                else:
                    parts.revert(name, self._failure.remark, "failed")
                return True
        return False

    @override
    def succeeded(self) -> None:
        self._parts.engine.report.note(f"{self._failure.remark}, and ran without {self._reverted}")

    def _is_in_force(self, name: str) -> bool:
        return self._parts.precision.is_ours if name == "precision" else self._parts.engine.has(name)


class RevertOptionOnTrial(Fallback):
    """Reverts the option that live trials tested in this step."""

    _is_done = False

    @override
    def prepare(self) -> bool:
        if self._is_done:
            return False
        self._is_done = True
        return self._parts.revert_option_on_trial(self._failure.error)

    @override
    def succeeded(self) -> None:
        error = one_line(self._failure.error)
        self._parts.engine.report.note(f"a step with an option on trial raised {error}, and ran without it")


class RevertAll(Fallback):
    """Reverts everything: this step and the rest of the run are the user's own."""

    is_last = True

    @override
    def prepare(self) -> bool:
        self._parts.end_trials()
        self._parts.engine.revert_all(self._failure.remark)
        model = self._parts.module.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # The other ranks are past the broadcast of buffers. DDP's forward sets this flag again for the next step.
            model.require_forward_param_sync = False
        return True

    @override
    def in_force(self) -> AbstractContextManager[None]:
        return self._parts.precision.in_float32()

    @override
    def succeeded(self) -> None:
        self._parts.engine.trial_steps.join_after_failure()
        self._parts.engine.degrade(
            f"{self._failure.remark}, and ran when it was repeated without the edits of this plugin: all of them are"
            " taken back"
        )


class NeedLessMemory(Fallback):
    """Puts on techniques that need less memory and change no number, one after the other, the cheapest first."""

    @override
    def prepare(self) -> bool:
        return self._failure.trains and self._parts.memory.put_on_next()


class EndTrialStep(Fallback):
    """Reverts everything if the step was a trial step: the trial itself may have exhausted the memory."""

    @override
    def prepare(self) -> bool:
        if not self._parts.engine.is_trying:
            return False
        self._parts.engine.revert_all(self._failure.remark)
        self._parts.end_trials()
        return True


class FreeCaches(Fallback):
    """Repeats a step of evaluation once, since the caches of the failed step are free now."""

    _is_done = False

    @override
    def prepare(self) -> bool:
        is_first, self._is_done = not (self._is_done or self._failure.trains), True
        return is_first


def fallbacks_for(failure: Failure, parts: RunParts) -> Sequence[Fallback]:
    """Returns the fallbacks for a failure, in the order in which they are tried."""
    after_oom = RevertOptionOnTrial, NeedLessMemory, EndTrialStep, FreeCaches
    kinds: Sequence[type[Fallback]] = (
        after_oom if failure.lacks_memory else (RevertSuspects, RevertOptionOnTrial, RevertAll)
    )
    return [kind(failure, parts) for kind in kinds]
