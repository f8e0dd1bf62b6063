"""The knobs of a search: for each one, the setups to try, their order, and the largest possible gain."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lightning_accel.core.allocators import EXPANDABLE_SEGMENTS, can_expand_segments, heaps, segment_settings
from lightning_accel.core.heap import heap_settings
from lightning_accel.core.host import Host, usable_cores
from lightning_accel.data.worker_schedule import LEAST_WAIT, MOST_WORKERS
from lightning_accel.search.job import TrialSetup, TuneJob
from lightning_accel.search.judging import Facts, Objective

Trying = Generator[TrialSetup, bool | None, None]
"""Yields changes to the best setup so far, and receives whether each was better."""


@dataclass(frozen=True)
class Knob:
    """One setting to change."""

    name: str  # in the report
    # The largest possible speed-up, from the measurements of the best setup.
    bound: Callable[[Facts], float]
    # Yields the setups to try, from the measurements of the best setup and that setup.
    tries: Callable[[Facts, TrialSetup], Trying]


def knobs(job: TuneJob, host: Host, objective: Objective, *, keeps_effective_batch: bool) -> list[Knob]:
    """Returns the knobs that a job has on a machine.

    Only the cost of waiting for data can be measured beforehand. The other bounds only define an order: knobs that have
    gained most elsewhere come first.
    """
    found = []
    if job.batch_size is not None:
        found.append(Knob("batch_size", _at_most(float("inf")), partial(_batch_sizes, job, keeps_effective_batch)))
    if "num_workers" in job.loader_settings:
        found.append(Knob("loader", lambda facts: 1 / (1 - min(facts.waited, 0.99)), partial(_loaders, job, host)))
    if host.compiler and job.plan.is_off("compile"):
        found.append(Knob("compile", _at_most(1.5), lambda *known: _compilers(host)))
    if host.kind == "cpu" and job.plan.is_off("threads") and torch.get_num_threads() > 1:
        found.append(Knob("threads", _at_most(1.2), lambda *known: _threads()))
    if objective != "speed":
        found.append(Knob("memory", _at_most(1.1), lambda *known: _memory_settings(job)))
    if allocators := _allocators(host):
        found.append(Knob("allocator", _at_most(1.05), lambda *known: _each(allocators)))
    return found


def _at_most(gain: float) -> Callable[[Facts], float]:
    return lambda facts: gain


def _each(setups: Sequence[TrialSetup]) -> Trying:
    for setup in setups:  # noqa: UP028  (a list cannot receive the answers)
        yield setup


def _batch_sizes(job: TuneJob, keeps_effective_batch: bool, facts: Facts, best: TrialSetup) -> Trying:
    """Doubles the batch size while that is better; if it never was, halves it while that is better."""
    size, accumulate = best.batch_size or job.batch_size or 1, best.accumulate or job.accumulate
    keeps = keeps_effective_batch or best.accumulate is not None  # the batch was made smaller to fit into memory
    effective = size * accumulate
    in_all = facts.samples / accumulate * facts.batches  # samples of the loader; infinite if unknown

    def setup(size: int) -> TrialSetup:
        return TrialSetup(batch_size=size, accumulate=effective // size if keeps else None)

    larger = 2 * size
    while larger <= in_all and (not keeps or effective % larger == 0) and (yield setup(larger)):
        larger *= 2
    if larger > 2 * size:
        return
    smaller = size // 2
    while smaller >= 1 and size % smaller == 0 and (yield setup(smaller)):
        smaller //= 2


def _loaders(job: TuneJob, host: Host, facts: Facts, best: TrialSetup) -> Trying:
    if facts.waited < LEAST_WAIT:
        return
    can_be_set = job.loader_settings
    now = int(best.loader.get("num_workers", can_be_set["num_workers"]))
    has_workers = now > 0

    def with_workers(count: int) -> TrialSetup:
        keeps = {"persistent_workers": True} if "persistent_workers" in can_be_set else {}
        return TrialSetup(loader={"num_workers": count, **keeps})

    first = workers = max(1, min(usable_cores() - 1, MOST_WORKERS // 2))  # a core is left to the training
    # More workers than cores are tried, too: workers that wait for a disk use no core.
    while workers <= MOST_WORKERS and (workers == now or (yield with_workers(workers))):
        has_workers = True
        workers *= 2
    if workers == first > 1 and first // 2 != now and (yield with_workers(first // 2)):
        has_workers = True
    if host.kind == "cuda" and can_be_set.get("pin_memory") is False:
        yield TrialSetup(loader={"pin_memory": True})
    if has_workers and "prefetch_factor" in can_be_set:
        yield TrialSetup(loader={"prefetch_factor": 4})


def _compilers(host: Host) -> Trying:
    if not (yield TrialSetup(plan={"compile": "default"})):
        return
    yield TrialSetup(plan={"compile": "max-autotune-no-cudagraphs"})
    if host.kind == "cuda":
        yield TrialSetup(plan={"compile": "reduce-overhead"})


def _threads() -> Trying:
    threads = torch.get_num_threads() // 2
    while threads >= 1 and (yield TrialSetup(plan={"threads": threads})):
        threads //= 2


def _memory_settings(job: TuneJob) -> Trying:
    if job.plan.is_off("sparse_activations"):
        yield TrialSetup(plan={"sparse_activations": "auto"})
    if job.plan.is_off("gradient_checkpointing") and (yield TrialSetup(plan={"gradient_checkpointing": "selective"})):
        yield TrialSetup(plan={"gradient_checkpointing": "full"})


def _allocators(host: Host) -> list[TrialSetup]:
    """Returns the allocators that must be selected before Python starts. The plan's own one is on in all runs."""
    if host.kind == "cuda":
        return [] if segment_settings() or not can_expand_segments() else [TrialSetup(environment=EXPANDABLE_SEGMENTS)]
    if host.kind != "cpu" or heap_settings():
        return []
    return [TrialSetup(environment=heap.environment) for heap in heaps() if "LD_PRELOAD" in heap.environment]
