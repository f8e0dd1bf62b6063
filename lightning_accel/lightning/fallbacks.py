"""Changes that let a failed step run again, in the order in which they are tried.

After an out-of-memory error, an option on trial is reverted first. Then techniques that need less memory are put on,
one by one. After any other error, edits are reverted: first the likeliest technique, then an option on trial, then
everything.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch.nn.parallel import DistributedDataParallel

from lightning_accel.core.report import EditError, one_line
from lightning_accel.lightning.oom_recovery import OomRecovery
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.lightning.step_outputs import StepOutputs
from lightning_accel.lightning.step_snapshot import Attempt
from lightning_accel.techniques.registry import declarations

_WORDS = {
    "precision": re.compile(r"dtype|scalar type|[Hh]alf|[Bb]?[Ff]loat(16|32)"),
    "memory_format": re.compile(r"view size|strides?\b|contiguous|memory.format|channels_last"),
    "inplace_activations": re.compile(r"in-?place"),
    "gradient_checkpointing": re.compile(r"recomput|checkpoint"),
    "compile": re.compile(r"[Dd]ynamo|[Ii]nductor|torch\.compile"),
    "graphs": re.compile(r"CUDA graph|captur"),
}


@dataclass
class Failure:
    """A step that raised an error; ``trains`` says whether the step keeps activations for a backward pass."""

    attempt: Attempt
    error: Exception
    suspects: Sequence[str]
    lacks_memory: bool = False
    trains: bool = True


@dataclass(frozen=True)
class Fallback:
    """One change to a run, made already, after which a failed step may succeed.

    Attributes:
        succeeded: Tells the report after the step has succeeded.
        context: The context in which the step runs again.
        is_last: Whether an error that the step raises now is the user's own.
    """

    succeeded: Callable[[], object] = lambda: None
    context: AbstractContextManager[None] = field(default_factory=nullcontext)
    is_last: bool = False


def with_less_memory(failure: Failure, engine: RunEngine, memory: OomRecovery) -> Iterator[Fallback]:
    """Yields after each change that may let a step without memory succeed."""
    yield from _without_option_on_trial(failure, engine)
    while failure.trains and memory.put_on_next():
        yield Fallback()
    while engine.is_trying:  # the trial itself may have exhausted the memory
        engine.revert_all(f"a step raised {one_line(failure.error)}")
        engine.end_trials()
        yield Fallback()
    if not failure.trains:
        yield Fallback()  # the caches of the failed step are free now


def with_fewer_edits(failure: Failure, engine: RunEngine, outputs: StepOutputs) -> Iterator[Fallback]:
    """Yields after each change that may let a step succeed. After the last one, all is as the user wrote it."""
    model = engine.module.trainer.strategy.model
    if isinstance(model, DistributedDataParallel):
        # The other ranks are past the broadcast of buffers. DDP's forward sets this flag again for the next step.
        model.require_forward_param_sync = False
    error, remark = failure.error, f"a step raised {one_line(failure.error)}"
    is_edit = isinstance(error, EditError)
    # The step may have failed on a tensor that an earlier turn left in another dtype or layout.
    certain = [*outputs.mend(), *(failure.suspects if is_edit else ())]
    for name in dict.fromkeys([*certain, *failure.suspects]):
        is_in_force = engine.precision.is_ours if name == "precision" else engine.has(name)
        if name in certain or is_in_force:
            engine.revert(name, str(error) if is_edit else remark, "refused" if is_edit else "failed")
            yield Fallback(functools.partial(engine.report.note, f"{remark}, and ran without {name}"))
    yield from _without_option_on_trial(failure, engine)
    # Ranks that wait for no verdicts of this step hear of it with their next times: until then, they step as before.
    is_alone = engine.module.trainer.world_size > 1 and not engine.trial_steps.owes_verdicts
    engine.revert_all(remark, keeps_optimizers=is_alone)
    if is_alone:
        engine.revert("precision", remark, "failed")

    def succeeded() -> None:
        engine.end_trials()
        engine.trial_steps.join_after_failure()
        engine.degrade(
            f"{remark}, and ran when it was repeated without the edits of this plugin: all of them are taken back"
        )

    yield Fallback(succeeded, engine.precision.in_float32(), is_last=True)


def _without_option_on_trial(failure: Failure, engine: RunEngine) -> Iterator[Fallback]:
    error = failure.error
    if engine.live is not None and engine.live.yields(error):
        line = f"a step with an option on trial raised {one_line(error)}, and ran without it"
        yield Fallback(functools.partial(engine.report.note, line))


def suspects(error: BaseException) -> list[str]:
    """Returns the names of the techniques that may have caused an error, the likeliest first."""
    if isinstance(error, EditError):
        return [error.technique]
    named = [technique for technique, words in _WORDS.items() if words.search(str(error))]
    # Each technique is a file or a folder. A technique from outside the package has its own module.
    homes = {_home(declaration.technique.__module__): name for name, declaration in declarations().items()}
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    passed = [homes[home] for home in map(_home, reversed(modules)) if home in homes]
    return list(dict.fromkeys([*named, *passed]))


def _home(module: str) -> str:
    return ".".join(module.split(".")[:3])
