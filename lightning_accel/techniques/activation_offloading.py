"""Activation offloading: what is saved for the backward pass waits for it in host memory, or on a disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from lightning_accel.core.byte_size import format_bytes, parse_bytes
from lightning_accel.core.host import Host
from lightning_accel.core.trial import NOT_SLOWER
from lightning_accel.memory.offload import Offloader
from lightning_accel.memory.saved import saving
from lightning_accel.settings import OffloadingPlan
from lightning_accel.techniques.base import Technique

DEPTHS = (1, 2, 4, 8)
WARM_UP_STEPS = 3  # the trials of other techniques, and buffers that are made
ROUNDS = 5


class ActivationOffloading(Technique):
    """Offloads the saved tensors of every training step.

    Args:
        plan: Where to, and from which size on: ``"host"`` or ``"disk"``.
        model: Whose parameters and buffers stay.
        device: Where it computes.
    """

    name: ClassVar[str] = "activation_offloading"
    acts_without_sites: ClassVar[bool] = True
    explicit = True

    def __init__(self, plan: OffloadingPlan, model: nn.Module, device: torch.device) -> None:
        assert plan.to in ("host", "disk")
        self.offloader = Offloader(
            device,
            plan.to,
            min_bytes=int(parse_bytes("activation_offloading.min_bytes", plan.min_bytes)),
            folder=plan.folder,
        )
        self._plan = plan
        self._model = model
        self._search = DepthSearch(device)
        self._gains_nothing = plan.to == "host" and device.type == "cpu"
        self.status = self._describe(None)

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind == "mps":
            return (
                "an Apple GPU computes in the host's memory, of which moving would free none, and to a disk nothing is"
                " moved from there. Use gradient_checkpointing to need less memory"
            )
        if host.kind == "xla":
            return (
                "XLA moves what it computes with itself, and nothing can be copied beside it. Use"
                " torch_xla.utils.checkpoint to need less memory"
            )
        return None

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        if stage == "train" and torch.is_grad_enabled():
            return self._offloaded()
        self._search.interrupt()
        return nullcontext()

    @contextmanager
    def _offloaded(self) -> Iterator[None]:
        self._search.next_step()
        self.offloader.prefetch_depth = self._search.depth
        before = self.offloader.stats.bytes_out
        try:
            with saving(self.offloader, self._model):
                yield
        finally:
            self.complaints += tuple(self.offloader.complaints)
            self.offloader.complaints.clear()
            self.status = self._describe(self.offloader.stats.bytes_out - before)

    @override
    def close(self) -> None:
        self.offloader.close()

    def _describe(self, step_bytes: int | None) -> str:
        if step_bytes is None:
            amount = "waiting for the first step"
        elif step_bytes == 0:
            amount = f"no saved tensor has {self._plan.min_bytes} bytes: min_bytes sets how large they must be"
        else:
            amount = f"{format_bytes(step_bytes)} a step out and back, {self._search.describe()}"
        hint = (
            " (on a CPU that is the memory they come from, so none is saved: activation_offloading='disk' saves it)"
            if self._gains_nothing
            else ""
        )
        return f"{self._plan.to}: {amount}{hint}"


class DepthSearch:
    """How far ahead to bring tensors back: every depth for some steps, then the smallest that is as fast as any.

    What is timed goes from the beginning of one training step to that of the next. A GPU's clock is read when it
    has got there; nothing waits for it.

    Attributes:
        depth: The one to use now.
    """

    def __init__(self, device: torch.device) -> None:
        self.depth = 2
        self._device = device
        self._left_to_warm_up = WARM_UP_STEPS
        self._taken: dict[int, int] = dict.fromkeys(DEPTHS, 0)
        self._running: tuple[int, Any] | None = None
        self._unread: list[tuple[int, Any, Any]] = []
        self._times: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        self._is_over = False

    def describe(self) -> str:
        """The depth, and whence it is."""
        if self._is_over:
            return f"prefetch depth {self.depth} (measured)"
        if torch.are_deterministic_algorithms_enabled():
            return f"prefetch depth {self.depth} (a deterministic run goes by no clock)"
        return f"prefetch depth {self.depth} (being measured)"

    def next_step(self) -> None:
        """A training step begins."""
        if self._is_over or torch.are_deterministic_algorithms_enabled():
            return
        if self._left_to_warm_up > 0:
            self._left_to_warm_up -= 1
            return
        now = self._now()
        if self._running is not None:
            depth, start = self._running
            self._unread.append((depth, start, now))
            self._taken[depth] += 1
        self._read()
        if min(map(len, self._times.values())) >= ROUNDS:
            self._settle()
            return
        # In turns: whatever drifts in the course of a run hits all of them.
        self.depth = min(DEPTHS, key=lambda depth: self._taken[depth])
        self._running = self.depth, now

    def interrupt(self) -> None:
        """Something else than a training step happens: the time until the next one tells nothing."""
        self._running = None

    def _settle(self) -> None:
        medians = {depth: statistics.median(times) for depth, times in self._times.items()}
        self.depth = min(depth for depth in DEPTHS if medians[depth] <= NOT_SLOWER * min(medians.values()))
        self._is_over = True
        self._running = None
        self._unread.clear()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for depth, start, end in unread:
            if self._device.type != "cuda":
                self._times[depth].append(1e3 * (end - start))
            elif end.query():
                self._times[depth].append(start.elapsed_time(end))
            else:
                self._unread.append((depth, start, end))
