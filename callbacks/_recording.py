"""A profiler at work for a few steps of a fit, and the files that it leaves."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_accel.callbacks._announcements import report_of
from lightning_accel.callbacks._phase_patch import PARTS, PartsPatch
from lightning_accel.callbacks._ranges import ModuleRanges, Ranges, add_tracks, techniques_by_site, with_techniques
from lightning_accel.core.patch import PatchSet
from lightning_accel.core.profilers import closing_ranges, giving_way
from lightning_accel.core.report import one_line
from lightning_accel.core.torch_private.profilers import memory_snapshot, record_memory_history
from lightning_accel.evidence.phase_names import COMMUNICATION, DATA, LOGGING
from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.private import FetchPatch
from lightning_accel.resilience.atomic_checkpoint import commit, discard

_PHASES = {DATA, *PARTS.values(), COMMUNICATION, LOGGING}
_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


class Recording:
    """Records from its making until :meth:`stop`.

    Args:
        trainer: In its fit.
        first: The number of the step that comes next.
        why: What the trace is for; in its metadata.
        give_way: Called when another profiler begins: :meth:`stop` and :meth:`write`.
        lose: Called when another profiler has taken over: :meth:`stop`, and nothing is to be written.
    """

    def __init__(
        self, trainer: Trainer, first: int, why: str, give_way: Callable[[], Any], lose: Callable[[], Any]
    ) -> None:
        self.steps: list[int] = []  # the numbers of those that were recorded as a whole
        self.without_tracks = ""  # why what was written has no tracks for steps, phases and techniques; empty: it has
        self._first, self._why, self._rank = first, why, trainer.global_rank
        self._report = report_of(trainer)
        device = trainer.strategy.root_device
        self._acting = techniques_by_site(self._report)
        self._memory: dict[str, Any] | None = None
        kinds = [ProfilerActivity.CPU, *filter(None, [_ACTIVITIES.get(device.type)])]
        # No shapes: with them the profiler holds tensors, and nothing could work in place.
        # One cycle is recorded; what is said of events of several, until torch 2.12 warns where it is not.
        self._profile = profile(activities=kinds, acc_events=True)
        ranges = Ranges(has_nvtx=device.type == "cuda")
        parts = PartsPatch(trainer)
        fetches = FetchPatch(trainer, lambda: ranges.enter(DATA), ranges.leave)
        patches = PatchSet([parts, fetches, ModuleRanges(trainer.lightning_module, ranges, self._acting)])
        with ExitStack() as stack:
            self._profile.start()
            stack.callback(self._profile.stop)
            stack.enter_context(closing_ranges())
            if has_memory_history(device):
                stack.enter_context(self._memory_history())
            stack.enter_context(giving_way(give_way, lose))
            stack.callback(patches.undo)
            patches.apply()
            parts.tell(ranges)
            stack.callback(parts.forget, ranges)
            stack.callback(ranges.close)
            ranges.enter("lightning-accel trace")  # for nsys profile --capture-range=nvtx
            self._ranges = ranges
            self._enter(first)
            self._around = stack.pop_all()

    def step_ended(self, number: int, *, goes_on: bool) -> None:
        """Told after each step, with whether the next one is to be recorded, too."""
        self._ranges.leave()
        self.steps.append(number)
        if goes_on:
            self._enter(number + 1)

    def _enter(self, number: int) -> None:
        self._ranges.enter(with_techniques(f"step {number}", self._acting, ""))

    def stop(self, *, is_lost: bool = False) -> None:
        """Ends recording, and leaves everything as it was.

        Where ``is_lost``, another profiler has taken over, whose metadata it would be.
        """
        if not is_lost:
            about: dict[str, Any] = {"steps": self.steps, "why": self._why, "rank": self._rank}
            about["report"] = None if self._report is None else self._report.to_dict()
            self._profile.add_metadata_json("lightning_accel", json.dumps(about, default=str))
        with suppress(RuntimeError) if is_lost else nullcontext():  # torch 2.11, in which it is at work no more
            self._around.close()

    def write(self, folder: Path, stamp: str) -> list[Path]:
        """Writes what was recorded, once it has stopped, into a folder that is made; a file is whole or not there.

        Raises:
            OSError: It cannot be written.
        """
        name = f"{stamp}-step{self._first}-rank{self._rank}"
        written = [_written(folder / f"trace-{name}.json.gz", self._export)]
        if self._memory is not None:
            memory = pickle.dumps(self._memory)
            written.append(_written(folder / f"memory-{name}.pickle", lambda to: to.write_bytes(memory)))
        return written

    def _export(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))
        try:
            add_tracks(path, _PHASES, self._acting)
        except ValueError as error:  # torch has written no JSON, which viewers read all the same, or do not
            self.without_tracks = one_line(error)

    @contextmanager
    def _memory_history(self) -> Iterator[None]:
        # Where somebody else has it kept already, that goes on.
        is_ours = not any(memory_snapshot()["device_traces"])
        if is_ours:
            record_memory_history(is_on=True)
        try:
            yield
        finally:
            self._memory = memory_snapshot()
            if is_ours:
                record_memory_history(is_on=False)


def has_memory_history(device: torch.device) -> bool:
    """Whether torch's allocator there can say what it does."""
    return device.type == "cuda"


def _written(path: Path, write: Callable[[Path], Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # torch compresses where the name ends so
    try:
        write(temporary)
        commit(temporary, path)
    except BaseException:
        discard(temporary)
        raise
    return path
