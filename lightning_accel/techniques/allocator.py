"""What allocating memory costs a step: the heap of the host, and the segments of a GPU's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal

import psutil
import torch
from torch import nn
from typing_extensions import override

from lightning_accel.core import heap
from lightning_accel.core.allocators import can_expand_segments, segment_settings
from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch
from lightning_accel.techniques.arms import OFF, Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.technique_context import Forecast, Verdict
from lightning_accel.techniques.technique_events import Event, Switched

KEEP = "keep"
LEAST_FAULTS = 128
"""A step that asks the system for fewer pages has nothing to gain."""

SLACK = 1.1
"""How many times what a step takes may be held: steps of other sizes or of another number format leave gaps."""

_FIRST_STEPS = 2  # which other techniques are tried on, and in which gradients and optimizers' state come to be
_COUNTED_STEPS = 3
_COUNTED_TURNS = 8  # of the plan that live trials have left, after two in which its memory comes to be
_RUN = "start with `lightning-accel run`, which measures what wins here"


class HeapPatch(Patch):
    """Has the heap keep freed memory. Taken back, it gives memory back from where glibc would come to at most."""

    settle = 1

    def __init__(self, can_be_asked: Callable[[], bool]) -> None:
        super().__init__("", "freed memory is kept for the next step")
        self._can_be_asked = can_be_asked
        self._heap = heap.Heap()
        self._process = psutil.Process()
        self._steps = 0  # begun since nothing free was held
        self._most_bytes = 0.0

    @override
    def _apply(self) -> None:
        self._heap.keep_free_memory()
        self._steps = 0

    @override
    def _undo(self) -> None:
        self._heap.leave()

    @property
    @override
    def variants(self) -> tuple[str, ...]:  # type: ignore[override]
        return (KEEP,) if self._can_be_asked() else ()

    @override
    def switch(self, variant: str) -> None:
        """Has memory kept between two steps, or the heap as it was in the plain run."""
        if variant == OFF:
            self._heap.as_it_was()
        elif self.is_applied:
            self._apply()
        else:
            self.apply()

    def limit(self) -> None:
        """Called before every step: what is free goes back where more is held than a step takes, and a tenth."""
        held_bytes = self._process.memory_info().rss
        if self._steps == 1:
            self._most_bytes = max(self._most_bytes, SLACK * held_bytes)
        elif self._steps > 1 and held_bytes > self._most_bytes:
            heap.release_free_memory()
            self._steps = 0
        self._steps += 1


def _lacks(host: Host) -> str | None:
    if own := segment_settings() if host.kind == "cuda" else heap.heap_settings():
        return f"as {', '.join(f'{name}={value}' for name, value in own.items())} has it"
    if host.kind == "cuda":
        return None if can_expand_segments() else "torch cannot expand segments of CUDA memory on this system"
    if (used := heap.heap_in_use()) == heap.GLIBC:
        return None
    return f"the heap is {used or 'of this system'}: only glibc's can be told in a run"


@register(
    "allocator",
    options=Literal["auto", "off"],
    default="auto",
    doc=(
        '``"auto"`` has the heap of glibc keep what is freed, where steps on the CPU ask the system for pages '
        'again and again; ``"off"`` leaves it alone. Other allocators: ``lightning-accel run``.'
    ),
    after="compile",
    exactness="exact",
)
class AllocatorTechnique(Technique):
    """Counts the page faults of the first steps; live trials have the heap keep its memory where there are many.

    Where there are few, it counts again in the plan that live trials have left at their end: if bfloat16 was dropped,
    tensors are twice as large.

    Gaps in the heap may take more memory, which a run that tries nothing is not asked to pay: before a step a tenth
    at most, within one that is of another number format or size more.
    """

    traits = Traits(trial_step=None, remembers=False, alters_steps=False, lacks=_lacks)

    def __init__(self, settings: Literal["auto", "off"], context: BuildContext) -> None:
        given = context.settings
        # The setting of another technique that is there to save memory of the host.
        self._for_memory = "activation_offloading" if given["activation_offloading"].to == "disk" else ""
        if given["memory_budget"].budget != "off":
            self._for_memory = "memory_budget"
        self._cuda_index = context.device.index  # None: the current one
        self._counts: list[int] = []  # of pages asked for so far, at the beginning of each step
        self._is_decided = self._is_kept = False
        self._is_cuda = context.host.kind == "cuda"
        told = Forecast(True, "told", "says what segments that expand would save: `lightning-accel run`")
        tried = Forecast(True, "tried", "freed memory is kept where steps ask the system for pages")
        self.run.forecast = told if self._is_cuda else tried

    @cached_property
    def _patch(self) -> HeapPatch:
        return HeapPatch(self._has_counted)

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind not in ("cpu", "cuda"):
            return f"nothing to choose on {host.kind}"
        if self._for_memory and host.kind == "cpu":
            return f"not beside {self._for_memory}, for which memory has to go back to the system"
        return None

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterator[Patch]:
        if host.kind == "cuda":
            self.run.watches_on = True
            self.run.status = "segments of CUDA memory are looked at in the first steps"
        else:
            self.run.live = Live(starts_off=True)
            yield self._patch

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        if stage == "train" and self._is_kept:
            self._patch.limit()
        elif stage == "train" and not self._is_decided:
            self._counts.append(heap.page_faults())
            if len(self._counts) > _FIRST_STEPS + _COUNTED_STEPS:
                self._decide()
        return nullcontext()

    def _has_counted(self) -> bool:
        if not self._is_decided and len(self._counts) >= _FIRST_STEPS + 2:
            self._decide()
        return self._is_decided

    def _decide(self) -> None:
        """Once. Ranks may come to different ends: an arm that one of them lacks is tried by none."""
        self._is_decided = True
        if self._is_cuda:
            self._say_what_segments_cost()
        elif gain_ms := self._gain_ms("step"):
            self.run.live = Live(gain_ms=lambda: gain_ms, starts_off=True)
        else:
            self.run.live = Live(gain_ms=self._gain_at_the_end_ms, starts_off=True, asked_alone=True)

    def _gain_at_the_end_ms(self) -> float | None:
        """Called once a turn; counts while it returns None. Of a heap that keeps its memory nothing can be counted."""
        if self._is_kept:
            return math.inf
        self._counts.append(heap.page_faults())
        return self._gain_ms("turn") if len(self._counts) > _FIRST_STEPS + _COUNTED_TURNS else None

    def _gain_ms(self, of: str) -> float:
        """Says what was counted, and clears it. Returns 0 if it is too little to gain anything."""
        counts = self._counts[_FIRST_STEPS:]
        self._counts.clear()
        # On the average: the end of the heap goes back to the system in some steps and not in others.
        faults = (counts[-1] - counts[0]) // (len(counts) - 1)
        faults_ms = faults * heap.page_fault_ms()
        words = f"a {of} asks the system for {faults:,} pages, about {faults_ms:.1f} ms"
        if faults < LEAST_FAULTS:
            self.run.revise("", Verdict("refused", f"{words}: nothing to gain"))
            return 0.0
        self._patch.change = f"{self._patch.change.partition(':')[0]}: {words}"
        self.run.revise("", Verdict("refused", f"{words}: only live trials switch it on"))
        # Whether they are installed is not asked here: it would take processes of gcc and ldconfig.
        self.run.details = f"{heap.JEMALLOC} or {heap.TCMALLOC} could save most of that: {_RUN}"
        return faults_ms

    @override
    def on(self, event: Event) -> None:
        if isinstance(event, Switched):
            self._is_kept = event.variant != OFF

    def _say_what_segments_cost(self) -> None:
        self.run.watches_on, self.run.status = False, ""
        index = self._cuda_index
        unused = torch.cuda.max_memory_reserved(index) - torch.cuda.max_memory_allocated(index)
        self.run.refuse(
            "",
            f"{format_bytes(unused)} of CUDA memory are held beyond what is used at the peak; segments that expand need"
            f" their variable before CUDA starts: {_RUN}",
        )
