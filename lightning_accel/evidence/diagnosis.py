"""What keeps a run from being faster or smaller, what to do about it, and what that is predicted to bring.

Each finding is a function of a record; a prediction is arithmetic on what was measured, after Amdahl ("Validity of the
Single Processor Approach", 1967, https://doi.org/10.1145/1465482.1465560): what is not touched takes what it took.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.evidence import anatomy as categories
from lightning_accel.evidence import parts
from lightning_accel.evidence.record import Record

if TYPE_CHECKING:
    from lightning_accel.evidence.peaks import Peaks

_WORTH = 0.05  # of a step: what takes less is not spoken of
_LARGE_BATCH = 8  # times the batch
_RARE_LOGGING = 50  # Lightning's own default
_LOGITS_LEFT = 0.15  # of the memory of logits, with losses in pieces: docs/results/linear_cross_entropy
_MOST_WORKERS = 8
_LEAST_LEAK_MIB = 16.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something to be mended.

    Attributes:
        name: By which another run's is told to be the same.
        says: What was found, with its figures.
        action: What to do, in a line.
        python: What to write; empty: there is no one line.
        yaml: The same in a configuration of Lightning's command line; empty: none.
        speedup: How many times as fast the run is predicted to be then; None: that cannot be told.
        freed_bytes: What the peak is predicted to lose.
        basis: What the prediction rests on.
    """

    name: str
    says: str
    action: str
    python: str = ""
    yaml: str = ""
    speedup: float | None = None
    freed_bytes: int = 0
    basis: str = ""


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A record, with what every finding asks for."""

    record: Record
    peaks: Peaks | None
    parts_ms: dict[str, float] = field(default_factory=dict)
    step_ms: float = 0.0
    typical_ms: float = 0.0

    def share(self, part: str) -> float:
        return self.parts_ms.get(part, 0.0) / self.step_ms


def diagnose(record: Record, peaks: Peaks | None = None) -> list[Finding]:
    """All findings, the most promising first.

    Args:
        record: Of a run.
        peaks: Of its machine, if they are known: without them no gain of another dtype is predicted.
    """
    parts_ms = record.parts_ms(0.2)
    if not parts_ms:
        return list(_leak(_Seen(record=record, peaks=peaks)))
    late = [ms for some in record.steps for _, _, ms in some.pieces()]
    seen = _Seen(
        record=record,
        peaks=peaks,
        parts_ms=parts_ms,
        step_ms=sum(parts_ms.values()),
        typical_ms=statistics.median(late[len(late) // 5 :]),
    )
    found = [finding for find in _FINDERS for finding in find(seen)]
    return sorted(found, key=lambda one: (-(one.speedup or 1.0), -one.freed_bytes))


def _loader(seen: _Seen) -> Iterator[Finding]:
    share = seen.share(parts.DATA)
    if share <= _WORTH:
        return
    header, loaders = seen.record.header, seen.record.header.loaders
    now = min((int(one.get("num_workers", 0)) for one in loaders), default=0)
    # A core is left to the training.
    workers = max(1, min(header.cores - 1, _MOST_WORKERS))
    says = f"waiting for data takes {share:.0%} of a step"
    if not loaders or now >= workers:
        yield Finding(
            name="loader",
            says=f"{says}, with {now} workers on {header.cores} cores",
            action="make a sample cheaper to load: decode and resize once, beforehand; transform whole batches on the"
            " device (`AccelPlugin(preprocess=...)`)",
        )
        return
    # One process loads while another computes; what several load is shared among them.
    waited = seen.parts_ms[parts.DATA]
    loads_ms = waited if now == 0 else seen.step_ms * now
    after = max(seen.step_ms - waited, loads_ms / workers)
    yield Finding(
        name="loader",
        says=says,
        action=f"load in {workers} other process{'es' if workers > 1 else ''}, while the model computes",
        python=f"DataLoader(..., num_workers={workers}, persistent_workers=True)",
        yaml="accel:\n  loader: auto",
        speedup=seen.step_ms / after,
        basis="the longer of computing and loading sets the pace, where they have cores of their own",
    )


def _logging(seen: _Seen) -> Iterator[Finding]:
    share, every = seen.share(parts.LOGGING), seen.record.header.log_every_n_steps
    if share <= _WORTH or not 0 < every < _RARE_LOGGING:
        return
    left = every / _RARE_LOGGING
    yield Finding(
        name="logging",
        says=f"logging every {every} step{'s' if every > 1 else ''} takes {share:.0%} of the time",
        action=f"log every {_RARE_LOGGING} steps",
        python=f"Trainer(log_every_n_steps={_RARE_LOGGING})",
        yaml=f"trainer:\n  log_every_n_steps: {_RARE_LOGGING}",
        speedup=1 / (1 - share * (1 - left)),
        basis="loggers are then called that much less often",
    )


def _between(seen: _Seen) -> Iterator[Finding]:
    share = seen.share(parts.REST)
    if share > 0.25 and seen.parts_ms[parts.REST] > 2.0:
        yield Finding(
            name="callbacks",
            says=f"callbacks and the loop take {share:.0%} of a step ({seen.parts_ms[parts.REST]:.1f} ms)",
            action="look at what callbacks and hooks do at every step: progress bars, metrics, pictures",
        )


def _precision(seen: _Seen) -> Iterator[Finding]:
    header, anatomy, peaks = seen.record.header, seen.record.anatomy, seen.peaks
    if anatomy is None or not header.native_bf16 or not header.precision.startswith("32"):
        return
    flops = sum(one.flops for one in anatomy.modules)
    low = sum(one.low_precision_flops for one in anatomy.modules)
    share = anatomy.product_ms / seen.typical_ms
    if not flops or low > 0.1 * flops or share <= _WORTH:
        return
    gain = None
    if peaks is not None:
        times = peaks.bfloat16_flops / peaks.float32_flops
        gain = 1 / (1 - min(share, 1.0) * (1 - 1 / times))
        if gain <= 1 + _WORTH:
            return
    yield Finding(
        name="precision",
        says=f"products and convolutions in float32 take {min(share, 1.0):.0%} of a step, and this machine computes in"
        " bfloat16",
        action="compute them in bfloat16",
        python='AccelPlugin(precision="bf16-mixed")',
        yaml="accel:\n  precision: bf16-mixed",
        speedup=gain,
        basis="by as much as the machine multiplies matrices faster in bfloat16",
    )


def _tiny_batches(seen: _Seen) -> Iterator[Finding]:
    anatomy = seen.record.anatomy
    if anatomy is None:
        return
    grows = anatomy.work_ms + seen.parts_ms.get(parts.DATA, 0.0) + seen.parts_ms.get(parts.TRANSFER, 0.0)
    # One step's operations are set beside a typical step: in the mean there are the machine's pauses, too.
    share = min(1.0, grows / seen.typical_ms)
    size = next((one["batch_size"] for one in seen.record.header.loaders if "batch_size" in one), None)
    if share > 0.5 or size is None:
        return
    yield Finding(
        name="tiny batches",
        says=f"{1 - share:.0%} of a step is spent on having steps and operations at all: {anatomy.operations:,}"
        f" operations, batches of {size}",
        action=f"train on batches of {_LARGE_BATCH * size}; it changes the training, schedules with it",
        python=f"DataLoader(..., batch_size={_LARGE_BATCH * size})",
        speedup=_LARGE_BATCH / (1 + (_LARGE_BATCH - 1) * share),
        basis="in samples a second: only the work of operations, loading and transfer grow with the batch",
    )


def _layouts(seen: _Seen) -> Iterator[Finding]:
    anatomy = seen.record.anatomy
    if anatomy is None or not anatomy.copies or not anatomy.operations_ms:
        return
    copied_ms = sum(copy.ms for copy in anatomy.copies)
    share = min(0.9, copied_ms / seen.typical_ms)
    if share <= _WORTH:
        return
    worst = anatomy.copies[0]
    made = f"{worst.made_by} makes" if worst.made_by else "somebody makes"
    where = worst.line or f"the backward pass of {worst.module or 'the model'}"
    yield Finding(
        name="layouts",
        says=f"{share:.0%} of a step is spent copying tensors whose strides do not suit the next operation,"
        f" {format_bytes(sum(copy.moved_bytes for copy in anatomy.copies))} of them",
        action=f"{made} a tensor that {where} has to copy: keep the order of its dimensions, or call .contiguous()"
        " once, before several use it",
        speedup=1 / (1 - share),
        basis="all of these copies go",
    )


def _logits(seen: _Seen) -> Iterator[Finding]:
    anatomy, report = seen.record.anatomy, seen.record.report or {"techniques": {}}
    if anatomy is None or anatomy.memory is None or report["techniques"].get("loss", {}).get("applied"):
        return
    size = anatomy.memory.parts.get(categories.LOGITS, 0)
    if size > 0.2 * anatomy.memory.peak_bytes:
        yield Finding(
            name="logits",
            says=f"{size / anatomy.memory.peak_bytes:.0%} of a step's peak are logits and what their loss keeps",
            action="compute head and loss a few tokens at a time",
            python='AccelPlugin(loss="on")',
            yaml='accel:\n  loss: "on"',
            speedup=1.0,
            freed_bytes=round((1 - _LOGITS_LEFT) * size),
            basis="logits of all tokens are then never there",
        )


def _recompiling(seen: _Seen) -> Iterator[Finding]:
    record = seen.record
    late = [some for some in record.steps if some.first > 0.2 * record.num_steps] or record.steps[1:]
    captured = sum(some.captured for some in late)
    whole = sum(some.captured for some in record.steps)
    is_short = len(record.steps) == 1 and whole > max(8, 0.2 * record.num_steps)
    if captured < 3 and not is_short:
        return
    times = [ms for some in record.steps for _, _, ms in some.pieces()]
    typical = statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]
    yield Finding(
        name="recompiling",
        says=f"torch.compile has captured {whole} graphs in {record.num_steps:,} steps, and goes on",
        action="let it expect sizes that change, or give it fewer of them; TORCH_LOGS=recompiles names the reasons",
        python="torch.compile(..., dynamic=True)",
        speedup=statistics.fmean(times) / typical,
        basis="all steps take what the faster quarter takes now",
    )


def _leak(seen: _Seen) -> Iterator[Finding]:
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
    more = (total / 2**20 - late[-1]) / slope
    until = f"; {format_bytes(total)} are full after {more:,.0f} more" if total else ""
    yield Finding(
        name="leak",
        says=f"memory grows by {slope:.3g} MiB a step{until}",
        action="keep numbers, not tensors: `loss.item()` or `.detach()` in what callbacks and modules collect; empty"
        " their lists at an epoch's end",
        speedup=1.0,
        freed_bytes=round(growth * 2**20),
        basis="what was added since the first third of the run",
    )


def _waits(seen: _Seen) -> Iterator[Finding]:
    anatomy = seen.record.anatomy
    if anatomy is None or not anatomy.waits:
        return
    line, count = max(anatomy.waits.items(), key=lambda one: one[1])
    is_gpu = "(cuda)" in seen.record.header.machine or "(rocm)" in seen.record.header.machine
    yield Finding(
        name="waits",
        says=f"in each step the host asks for {sum(anatomy.waits.values())} results of the device, {count} of them at"
        f" {line}",
        action="log tensors as they are (`self.log` takes them), and ask for numbers once in many steps",
        speedup=None if is_gpu else 1.0,
        basis="on a CPU nothing is waited for; on a GPU, until its queue is empty",
    )


_FINDERS: tuple[Callable[[_Seen], Iterator[Finding]], ...] = (
    _loader,
    _logging,
    _between,
    _precision,
    _tiny_batches,
    _layouts,
    _logits,
    _recompiling,
    _leak,
    _waits,
)
