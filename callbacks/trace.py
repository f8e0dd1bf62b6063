"""Traces of a few training steps, for Perfetto, nsys and PyTorch's memory viewer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lightning_accel.callbacks._fit_traces import FitTraces
from lightning_accel.core.checks import check_choice
from lightning_accel.lightning.packages import Callback, LightningModule, Trainer


class TraceCallback(Callback):
    """Traces a few training steps by :mod:`torch.profiler`, as one file for each rank and each time.

    ``<folder of the first logger>/accel/trace-<time>-step<number>-rank<rank>.json.gz`` opens in
    https://ui.perfetto.dev and in chrome://tracing; without a logger that has a folder it lies in
    ``<default_root_dir>/accel/``. Beside torch's own operations, and kernels where there is a GPU, it has named ranges
    for each step, its parts (``waiting for data``, ``transfer and preprocessing``, ``forward``, ``backward``,
    ``optimizer``, ``logging``, with several ranks ``communication``), and every module that holds others or has
    weights, by its name in the model and with the techniques of AccelPlugin that act there:
    ``encoder.layers.0 [gradient_checkpointing]``. Lightning calls forward and backward from within the optimizer's
    step, where it is shown. Steps, parts and each technique are also tracks of a process of their own, above the
    threads. AccelPlugin's report is in the metadata, under ``lightning_accel``.

    On a CUDA device there is also ``memory-….pickle``, what torch's allocator did in these steps, for
    https://pytorch.org/memory_viz, and the ranges are NVTX ranges, too, all within one named ``lightning-accel trace``:
    ``NSYS_NVTX_PROFILER_REGISTER_ONLY=0 nsys profile --capture-range=nvtx --nvtx-capture='lightning-accel trace' …``.

    **What it costs.** Steps that are not traced have nothing in their way. A traced one takes longer, the first one of
    a process by a second or more, and a file of many megabytes is written after the last one, while the training waits.
    :class:`SpeedMemoryLogger` counts these steps like others, and AccelPlugin, which times its changes in the first two
    steps of a run, may decide otherwise where these are traced.

    Validation is left out: a trace ends where it begins, and goes on in another file after it. Only one profiler can
    be at work: where there is another (``Trainer(profiler="pytorch")``), nothing is traced, and where one begins, a
    trace ends. That, and whatever else goes wrong, is said once, and the run goes on.

    Args:
        steps: How many steps to trace, each time. For ``on="schedule"`` also the numbers of the steps, such as
            ``range(100, 103)``, from 1 where training began; a number alone is that many from the 20th of a fit on.
        on: When: ``"schedule"``, at these steps; ``"slow"``, after a step that took 3 times the median of those before
            it (its own time cannot be looked at any more; what made it slow often comes again); ``"signal"``, when
            somebody sends the process SIGUSR2 (``kill -USR2 <pid>``) in a fit, except where that has a handler already.
        at_most: So many times in a fit, for ``on="slow"``.

    Attributes:
        files: What this rank has written, in all fits.

    Raises:
        ValueError: ``on`` is none of these; ``steps`` or ``at_most`` is less than 1, empty, or names steps where
            nobody knows them before.
    """

    def __init__(
        self,
        steps: int | Sequence[int] = 3,
        on: Literal["schedule", "slow", "signal"] = "schedule",
        at_most: int = 3,
    ) -> None:
        super().__init__()
        check_choice("on", on, ("schedule", "slow", "signal"))
        numbers = [steps] if isinstance(steps, int) else list(steps)
        if not numbers or min(numbers) < 1:
            raise ValueError(f"steps={steps!r}: give how many steps to trace, or their numbers; both begin with 1.")
        if on != "schedule" and not isinstance(steps, int):
            raise ValueError(f"steps={steps!r} with on={on!r}: give how many steps to trace, steps=3 say.")
        if at_most < 1:
            raise ValueError(f"at_most={at_most}: give how many traces a fit may have, from 1 on.")
        self.files: list[Path] = []
        self._steps, self._on, self._at_most = steps, on, at_most
        self._fit: FitTraces | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self._fit = FitTraces(trainer, self._steps, self._on, self._at_most, self.files)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.pause()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.step_begins()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.step_ended()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.interrupt()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._fit is not None:
            self._fit.pause()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.ends()
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()
