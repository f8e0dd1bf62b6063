"""What takes time around the work of steps: loading, logging, callbacks, compiling again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_accel.evidence import phase_names
from lightning_accel.evidence.events import StepMeasured
from lightning_accel.evidence.finding import WORTH, Finding, Seen
from lightning_accel.evidence.speed import BEGINNING

_RARE_LOGGING = 50  # Lightning's own default
_MOST_WORKERS = 8
_WORTH_WORKERS = 0.1  # of a step: what a worker hands over has to be waited for, too
_WORTH_DECODING = 0.25  # beforehand, which is work
_HANDING_OVER_MS = 0.5
_FEW = 5  # steps, whose mean tells nothing


def loader(seen: Seen) -> Iterator[Finding]:
    share = seen.share(phase_names.DATA)
    # The few steps that were looked at may have met a busy moment of the machine.
    if min(share, seen.waited) <= _WORTH_WORKERS:
        return
    header, loaders = seen.record.header, seen.record.header.loaders
    now = min((int(one.get("num_workers", 0)) for one in loaders), default=0)
    # A core is left to the training.
    workers = max(1, min(header.cores - 1, _MOST_WORKERS))
    says = f"waiting for data takes {share:.0%} of a step"
    has_room = bool(loaders) and now < workers
    speedup = seen.step_ms / _step_ms_with_workers(seen, now, workers) if has_room else 1.0
    if speedup <= 1 + _WORTH_WORKERS:
        samples_ms = min(seen.parts_ms[phase_names.DATA], seen.per_look(lambda some: some.samples_ms))
        speedup = seen.step_ms / max(seen.step_ms - samples_ms, WORTH * seen.step_ms)
        if has_room and speedup <= 1 + _WORTH_DECODING:
            return
        yield Finding(
            name="loader",
            says=f"{says}, with {now} workers on {header.cores} cores, and {header.threads} threads that compute",
            action="make a sample cheaper to load: decode and resize once, beforehand; transform whole batches on the"
            " device (`AccelPlugin(preprocess=...)`)"
            if header.has_images
            else "make a sample cheaper to load: compute once, beforehand, what is the same in every epoch",
            speedup=speedup if samples_ms else None,
            basis="if to load a sample took no time" if samples_ms else "",
        )
        return
    yield Finding(
        name="loader",
        says=says,
        action=f"load in {workers} other process{'es' if workers > 1 else ''}, while the model computes",
        python=f"DataLoader(..., num_workers={workers}, persistent_workers=True)"
        if header.makes_loaders
        else 'AccelPlugin(loader="auto")',
        yaml="accel:\n  loader: auto",
        speedup=speedup,
        basis="the longer of computing and loading sets the pace; a worker without a core of its own holds up a thread"
        " that computes, and with it all of them",
    )


def _step_ms_with_workers(seen: Seen, now: int, workers: int) -> float:
    waited_ms = seen.parts_ms[phase_names.DATA]
    computes_ms = seen.step_ms - waited_ms + _HANDING_OVER_MS
    if now:  # what they all load is what sets the pace
        return max(computes_ms, seen.step_ms * now / workers)
    header = seen.record.header
    loading_cpu_ms = min(waited_ms, seen.per_look(lambda some: some.loading_cpu_ms))
    without_core = max(0, header.threads + workers - header.cores) / workers
    return max(computes_ms + without_core * loading_cpu_ms, waited_ms / workers)


def logging(seen: Seen) -> Iterator[Finding]:
    share, every = seen.share(phase_names.LOGGING), seen.record.header.log_every_n_steps
    if share <= WORTH or not 0 < every < _RARE_LOGGING:
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


def callbacks(seen: Seen) -> Iterator[Finding]:
    share = seen.share(phase_names.REST)
    if share > 0.25 and seen.parts_ms[phase_names.REST] > 2.0:
        yield Finding(
            name="callbacks",
            says=f"callbacks and the loop take {share:.0%} of a step ({seen.parts_ms[phase_names.REST]:.1f} ms)",
            action="look at what callbacks and hooks do at every step: progress bars, metrics, pictures",
        )


def recompiling(seen: Seen) -> Iterator[Finding]:
    record = seen.record
    before = record.steps[0].first - 1 if record.steps else 0  # steps of the run that this one goes on from
    late = [some for some in record.steps if some.first - before > BEGINNING * record.num_steps] or record.steps[1:]
    captured = sum(some.captured for some in late)
    whole = sum(some.captured for some in record.steps)
    goes_on = captured >= 3
    # Torch gives up after some hundred of them, and a run may have come there.
    if not goes_on and whole <= max(8, 0.2 * record.num_steps):
        return
    chosen = late if goes_on else record.steps
    took_ms = sum(piece.steps * piece.ms for some in chosen for piece in some.pieces())
    lost_ms = _lost_to_recompiling_ms(chosen, took_ms)
    if not goes_on:  # the first one is needed
        lost_ms *= (whole - 1) / whole
    yield Finding(
        name="recompiling",
        says=f"torch.compile has captured {whole} graphs in {record.num_steps:,} steps{', and goes on' * goes_on}: "
        f"{min(1.0, lost_ms / took_ms):.0%} of the time",
        action="let it expect sizes that change, or give it fewer of them; TORCH_LOGS=recompiles names the reasons",
        python="torch.compile(..., dynamic=True)",
        speedup=took_ms / max(took_ms - lost_ms, WORTH * took_ms),
        basis="all steps take what those take that capture nothing; where these are few, what capturing took goes",
    )


def _lost_to_recompiling_ms(chosen: Sequence[StepMeasured], took_ms: float) -> float:
    """What steps that captured a graph took beyond others.

    That is more than the compiler's own account of itself: what it leaves behind keeps the garbage collector busy, and
    caches are cold after it.
    """
    compiling_ms = sum(some.compiling_ms for some in chosen)
    capturing = sum(some.capturing for some in chosen)
    capturing_ms = sum(some.capturing_ms for some in chosen)
    others = sum(some.timed for some in chosen) - capturing
    if others < _FEW:
        return compiling_ms
    return max(compiling_ms, capturing_ms - capturing * max(0.0, took_ms - capturing_ms) / others)
