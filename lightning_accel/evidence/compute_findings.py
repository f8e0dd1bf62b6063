"""What makes a step longer, or larger, than it has to be: dtypes, small batches, strides, waits, logits, leaks."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.evidence import phase_names
from lightning_accel.evidence import step_breakdown as categories
from lightning_accel.evidence.finding import WORTH, Finding, Seen
from lightning_accel.evidence.peaks import Peaks
from lightning_accel.evidence.step_breakdown import BATCH, Anatomy, LayoutCopy, OperationsAlike

_LARGE_BATCH = 8  # times the batch
# Of a step at most grows with a batch that is called so: it is a change of training, worth much or nothing.
_TINY = 0.25
_MOST_TO_HAVE_MS = 0.5  # what it costs to have an operation: a few hundredths for most of them
_OF_PEAKS = 0.5  # what operations reach where they have much to do
_TIMES_MOVED = 4  # bytes of a batch: read and written where it is made, and again on their way to the device
_BYTES_CAST = 12  # of a parameter: it and its gradient are read and written, as float32 and as bfloat16


def precision(seen: Seen) -> Iterator[Finding]:
    header, anatomy, peaks = seen.record.header, seen.record.anatomy, seen.peaks
    is_float32 = header.precision.startswith("32") and "precision" not in seen.record.held.choices
    if anatomy is None or not header.native_bf16 or not is_float32:
        return
    flops = sum(one.flops for one in anatomy.modules)
    low = sum(one.low_precision_flops for one in anatomy.modules)
    share = min(1.0, seen.share_of_operations(anatomy.product_ms))
    if not flops or low > 0.1 * flops or share <= WORTH:
        return
    gain = None
    if peaks is not None:
        times = peaks.bfloat16_flops / peaks.float32_flops
        casts_ms = 1e3 * _BYTES_CAST * (header.parameters or 0) / peaks.bytes_per_sec
        gain = 1 / (1 - share * (1 - 1 / times) + casts_ms / seen.typical_ms)
        if gain <= 1 + WORTH:
            return
    yield Finding(
        name="precision",
        says=f"products and convolutions in float32 take {share:.0%} of a step, and this machine computes in bfloat16",
        action="compute them in bfloat16",
        python='AccelPlugin(precision="bf16-mixed")',
        yaml="accel:\n  precision: bf16-mixed",
        speedup=gain,
        basis="by as much as the machine multiplies matrices faster in bfloat16, less what casts of weights take",
    )


def tiny_batches(seen: Seen) -> Iterator[Finding]:
    anatomy = seen.record.anatomy
    if anatomy is None or not seen.typical_ms:
        return
    work_ms, at_most_ms = _work_ms(anatomy, seen.peaks)
    feeding_ms = _feeding_ms(seen)
    # One step's operations are set beside a typical step: in the mean there are the machine's pauses, too.
    # Loggers that are slow are a finding of their own.
    step_ms = seen.typical_ms * max(WORTH, 1 - seen.share(phase_names.LOGGING))
    share = min(1.0, (work_ms + feeding_ms) / step_ms)
    size = next((one["batch_size"] for one in seen.record.header.loaders if "batch_size" in one), None)
    if at_most_ms + feeding_ms > _TINY * step_ms or size is None:
        return
    yield Finding(
        name="tiny batches",
        says=f"{1 - share:.0%} of a step is spent on having steps and operations at all: {anatomy.operations:,}"
        f" operations, batches of {size}",
        action=f"train on batches of {_LARGE_BATCH * size}; it changes the training, schedules with it",
        python=f"DataLoader(..., batch_size={_LARGE_BATCH * size})",
        speedup=_LARGE_BATCH / (1 + (_LARGE_BATCH - 1) * share),
        basis="in samples a second: only the work of operations, samples' loading and their bytes grow with the batch",
    )


def _feeding_ms(seen: Seen) -> float:
    """What of waiting for data and of transfer grows with the batch, in a typical step.

    Loading samples does. What a loader and Lightning do around it does not, but for the bytes that they move.
    """
    if not seen.step_ms:
        return 0.0
    waited_ms, transfer_ms = seen.parts_ms.get(phase_names.DATA, 0.0), seen.parts_ms.get(phase_names.TRANSFER, 0.0)
    samples_ms = min(waited_ms, seen.per_look(lambda some: some.samples_ms))
    grows_ms = waited_ms + transfer_ms
    is_preprocessing, memory = seen.share(phase_names.TRANSFER) > WORTH, seen.record.memory
    if samples_ms and not is_preprocessing and seen.peaks is not None and memory is not None:
        moved = _TIMES_MOVED * memory.parts.get(BATCH, 0)
        grows_ms = min(grows_ms, samples_ms + 1e3 * moved / (_OF_PEAKS * seen.peaks.bytes_per_sec))
    return grows_ms * seen.typical_ms / seen.step_ms


def _work_ms(anatomy: Anatomy, peaks: Peaks | None) -> tuple[float, float]:
    """What grows with the batch: what operations take beyond having them; and what that may be at most.

    Having one costs more for a convolution than for an addition, and more of all on a busy machine, but never very
    much. Of short operations grows what they have to do, by what the machine can; at most, of those that have more to
    do than it costs to have one that has next to nothing, all that they took.
    """
    if peaks is None or not anatomy.alike:
        return anatomy.work_ms, anatomy.work_ms
    to_do_ms = [_to_do_ms(some, peaks) for some in anatomy.alike]
    idle = [some for some, ms in zip(anatomy.alike, to_do_ms, strict=True) if ms < some.count * anatomy.least_ms]
    idle_ms = sum(some.ms for some in idle) / max(1, sum(some.count for some in idle))
    work_ms = at_most_ms = 0.0
    for some, ms in zip(anatomy.alike, to_do_ms, strict=True):
        beyond_ms = max(0.0, some.ms - some.count * anatomy.least_ms)
        grows_ms = min(beyond_ms, max(ms, some.ms - some.count * _MOST_TO_HAVE_MS))
        work_ms += grows_ms
        at_most_ms += beyond_ms if ms > some.count * idle_ms else grows_ms
    return work_ms, at_most_ms


def _to_do_ms(some: OperationsAlike, peaks: Peaks) -> float:
    float32_s = (some.flops - some.low_precision_flops) / peaks.float32_flops
    low_precision_s = some.low_precision_flops / peaks.bfloat16_flops
    return 1e3 * (float32_s + low_precision_s + some.moved_bytes / peaks.bytes_per_sec) / _OF_PEAKS


def layouts(seen: Seen) -> Iterator[Finding]:
    anatomy = seen.record.anatomy
    if anatomy is None or not anatomy.copies:
        return
    share = min(0.9, seen.share_of_operations(_avoidable_ms(anatomy.copies)))
    if share <= WORTH:
        return
    worst = anatomy.copies[0]
    made = f"{worst.made_by} makes" if worst.made_by else "somebody makes"
    where = worst.line or f"the backward pass of {worst.module or 'the model'}"
    yield Finding(
        name="layouts",
        says=f"{share:.0%} of a step goes to tensors whose strides do not suit the operations that read them:"
        f" {format_bytes(sum(copy.moved_bytes for copy in anatomy.copies))} of them are copied, or read out of order",
        action=f"{made} a tensor that {where} has to copy: keep the order of its dimensions, or call .contiguous()"
        " once, before several use it",
        speedup=1 / (1 - share),
        basis="of what one line made one copy is left; the others go",
    )


def _avoidable_ms(copies: Sequence[LayoutCopy]) -> float:
    """All copies, but for one of what is copied several times."""
    ms: defaultdict[str, float] = defaultdict(float)
    count: defaultdict[str, int] = defaultdict(int)
    for copy in copies:
        ms[copy.made_by] += copy.ms
        count[copy.made_by] += copy.count
    return sum(took - (took / count[made] if made and count[made] > 1 else 0.0) for made, took in ms.items())


def waits(seen: Seen) -> Iterator[Finding]:
    anatomy = seen.record.anatomy
    if anatomy is None or not anatomy.waits:
        return
    line, count = max(anatomy.waits.items(), key=lambda one: one[1])
    is_gpu = "(cuda)" in seen.record.header.machine or "(rocm)" in seen.record.header.machine
    yield Finding(
        name="waits",
        says=f"the host asks the device for results {sum(anatomy.waits.values())} times a step, {count} of them at"
        f" {line}",
        action="log tensors as they are (`self.log` takes them), and ask for numbers once in many steps",
        speedup=None if is_gpu else 1.0,
        basis="on a CPU nothing is waited for; on a GPU, until its queue is empty",
    )


_LOGITS_LEFT = 0.15  # of the memory of logits, with losses in pieces: docs/results/linear_cross_entropy
_LEAST_LEAK_MIB = 16.0


def logits(seen: Seen) -> Iterator[Finding]:
    memory = seen.record.memory
    if memory is None or seen.record.reasons("loss", "ON"):
        return
    size = memory.parts.get(categories.LOGITS, 0)
    if size > 0.2 * memory.peak_bytes:
        yield Finding(
            name="logits",
            says=f"{size / memory.peak_bytes:.0%} of a step's peak are logits and what their loss keeps",
            action="compute head and loss a few tokens at a time",
            python='AccelPlugin(techniques={"loss": "on"})',
            yaml='accel:\n  techniques: {loss: "on"}',
            speedup=1.0,
            freed_bytes=round((1 - _LOGITS_LEFT) * size),
            basis="logits of all tokens are then never there",
        )


def leak(seen: Seen) -> Iterator[Finding]:
    held = [mib for some in seen.record.steps for mib in some.held_mib]
    late = held[len(held) // 3 :]
    if len(late) < 6:
        return
    steps_each = seen.record.num_steps / len(held)
    growing = sum(b > a for a, b in itertools.pairwise(late)) / (len(late) - 1)
    growth = late[-1] - late[0]
    if growing < 0.6 or growth < max(_LEAST_LEAK_MIB, 0.02 * late[0]):
        return
    slope = statistics.linear_regression([steps_each * place for place in range(len(late))], late).slope
    total = seen.record.header.device_bytes
    grown = (late[-1] - held[0]) * len(held) / (len(held) - 1)
    more = (total / 2**20 - late[-1]) / slope
    until = f"; {format_bytes(total)} are full after {more:,.0f} more" if total else ""
    yield Finding(
        name="leak",
        says=f"memory grows by {slope:.3g} MiB a step{until}",
        action="keep numbers, not tensors: `loss.item()` or `.detach()` in what callbacks and modules collect; empty"
        " their lists at an epoch's end",
        speedup=1.0,
        # What is kept goes into gaps first, so that memory may begin to grow later than the leak.
        freed_bytes=round(min(slope * seen.record.num_steps, grown) * 2**20),
        basis="all of the run's steps have added as much as those past its first third, but no more than memory has"
        " grown",
    )
