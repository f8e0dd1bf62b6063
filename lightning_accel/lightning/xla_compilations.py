"""XLA's compilations in a run, by step and reason: each shape of a batch is a separate program."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_accel.core import xla
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.report import Report
from lightning_accel.core.tree import tensors_in
from lightning_accel.lightning.packages import Strategy
from lightning_accel.step.layers import Call, Layer

NAME = "xla"
"""The name of the record in the report."""

_STAGES = {"training_step": "train", "validation_step": "validate", "test_step": "test", "predict_step": "predict"}
_FIRST_STEPS = 2  # the first step makes states that the second one uses: of optimizers, of metrics
_MANY_SHAPES = 4
_SHOWN = 12

_FIRST, _SHAPES, _OTHER = "in_first_steps", "for_new_shapes", "for_other_reasons"
_REASONS = {
    _FIRST: "in the first two steps of a stage",
    _SHAPES: "for batches of new shapes",
    _OTHER: "for shapes that were there before",
}

Shapes = tuple[tuple[int, ...], ...]


@dataclass
class _Met:
    """The steps and compilations for batches of one shape."""

    steps: int = 0
    programs: int = 0
    seconds: float = 0.0


class Compilations(Layer):
    """Counts the programs that XLA compiles for each batch shape, and makes XLA run each recorded training step.

    XLA compiles a program when a step first runs with operations or shapes that no step had before. Programs compiled
    since a step began belong to that step. Nothing is read from the device.

    Attributes:
        is_recording: Whether a training step was recorded since the latest end of one.
    """

    name = "xla"

    def __init__(self, strategy: Strategy, report: Report, cache: str) -> None:
        super().__init__([(strategy, tuple(_STAGES))])
        self.is_recording = False
        self._report, self._cache = report, cache
        self._met: dict[tuple[str, Shapes], _Met] = {}
        self._counts: Counter[str] = Counter()  # programs by the reason for their compilation
        self._latest_other = 0  # the step at which one was compiled for another reason
        self._steps: Counter[str] = Counter()
        self._under_way: tuple[str, Shapes] | None = None
        self._programs, self._seconds = xla.programs_compiled(), xla.compiling_s()
        self._has_advised = False
        report.of(NAME).is_on = True
        self._tell()

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        if stage == "training_step":
            if self.is_recording:  # while gradients accumulate, steps without an end would become one program
                xla.end_step()
            self.is_recording = True
        self._settle()
        named = _STAGES[stage]
        key = self._under_way = named, _shapes(args[0] if args else kwargs)
        self._met.setdefault(key, _Met()).steps += 1
        self._steps[named] += 1
        return call(*args, **kwargs)

    def close(self) -> None:
        """Counts the programs of the last step."""
        self._settle()
        self._under_way = None
        self._tell()

    def _settle(self) -> None:
        programs = xla.programs_compiled()
        new, self._programs = programs - self._programs, programs
        if not new or self._under_way is None:
            return
        seconds = xla.compiling_s()
        took, self._seconds = seconds - self._seconds, seconds
        met, stage = self._met[self._under_way], self._under_way[0]
        met.programs += new
        met.seconds += took
        reason = _FIRST if self._steps[stage] <= _FIRST_STEPS else _SHAPES if met.steps == 1 else _OTHER
        self._counts[reason] += new
        if reason == _OTHER:
            self._latest_other = self._steps[stage]
        self._tell()
        self._advise()

    def _advise(self) -> None:
        shapes = {shapes for (stage, shapes), met in self._met.items() if stage == "train" and met.programs}
        if self._has_advised or len(shapes) < _MANY_SHAPES:
            return
        self._has_advised = True
        line = (
            f"XLA has compiled the training step for {len(shapes)} shapes of a batch ({_in_words(*shapes)}), and"
            f" compiles for each one to come. {_mend(shapes)}"
        )
        self._report.note(line)
        rank_zero_info(f"lightning-accel: {line}")

    def _tell(self) -> None:
        record = self._report.of(NAME)
        programs = sum(met.programs for met in self._met.values())
        seconds = sum(met.seconds for met in self._met.values())
        counts = {reason: self._counts[reason] for reason in _REASONS}
        why = ", ".join(f"{number} {_REASONS[reason]}" for reason, number in counts.items() if number)
        why += f" (the latest at step {self._latest_other})" if self._latest_other else ""
        record.status = (
            f"{programs} programs compiled in {seconds:.1f} s, over {sum(self._steps.values())} steps"
            f"{': ' if why else ''}{why}; {self._cache}"
        )
        shown = sorted(self._met.items(), key=lambda one: -one[1].seconds)
        lines = [
            f"{stage}, {_in_words(shapes)}: {met.programs} programs in {met.seconds:.1f} s, {met.steps} steps"
            for (stage, shapes), met in shown[:_SHOWN]
        ]
        more = [f"… and {len(shown) - _SHOWN} more shapes"] if len(shown) > _SHOWN else []
        record.details = "\n".join(lines + more)
        record.data = {"programs": programs, "seconds": seconds, **counts}


def _shapes(batch: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(batch) if type(tensor) is Tensor)


def _in_words(*shapes: Shapes) -> str:
    """Formats shapes: ``"(8, 17) and (8,)"``, each shape once; of several batches, the first three."""
    texts = [" and ".join(dict.fromkeys(map(str, one))) or "no tensors" for one in sorted(shapes)]
    return "; ".join(texts[:3]) + (f"; … {len(texts) - 3} more" if len(texts) > 3 else "")


def _mend(shapes: set[Shapes]) -> str:
    samples_apart = {tuple(one[1:] for one in each) for each in shapes}
    if len(samples_apart) == 1:
        return "Only the number of samples differs: give DataLoader drop_last=True, and batches of one size."
    return (
        "Pad batches to few lengths: padding=64 does it for batches of text with an attention_mask; for others,"
        " the loader's collate_fn."
    )
