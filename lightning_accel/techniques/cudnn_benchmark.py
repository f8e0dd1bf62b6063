"""Convolutions of cuDNN by the fastest kernel, found by timing several, where the same shapes come again and again.

https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cudnn.torch.backends.cudnn.benchmark
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from lightning_accel.core.device import CONVOLUTIONS
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch, SwitchPatch
from lightning_accel.core.tree import tensors_in
from lightning_accel.techniques.arms import ArmSetup, Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import Forecast

CudnnBenchmarkSetting = Literal["auto", "on", "off"]

REPEATED = 3
"""So many batches of one shape have come before it is timed."""

LEAST_SHARE = 0.1
"""Of all batches, which one shape has to make up: else what its timing takes never comes back."""

TIMING_S = 1.0
"""What timing takes for each convolution and each shape of batches: 9.3 s for nine, in bfloat16 on an H100."""

MANY_SHAPES = 1000  # of which none repeats often: their counts begin anew


class CudnnBenchmarkPatch(Patch):
    """Has kernels timed, at once or where :meth:`time_where_wanted` is told; a flag is undone where it is still ours.

    CuDNN's plans are kept by shape and by ``deterministic``, not by how they were found (torch's ``Conv_v8.cpp``, from
    the convolutions of cuDNN 8 on): a shape that has run with the plan of a rule is not timed any more, and one that
    was timed keeps its plan. So that both sides of a trial have their own, those that are timed are the deterministic
    ones, ``with_own_plans``.
    """

    settle = 1

    def __init__(self, change: str, *, with_own_plans: bool) -> None:
        super().__init__("", change)
        flags = ("benchmark", "deterministic") if with_own_plans else ("benchmark",)
        cudnn = torch.backends.cudnn
        self._switches = [
            SwitchPatch(partial(getattr, cudnn, flag), partial(setattr, cudnn, flag), True) for flag in flags
        ]
        self._is_at_once = not with_own_plans
        self._is_wanted = False  # until live trials ask for it: timing takes as long as hundreds of steps

    @override
    def switch(self, variant: str) -> None:
        self._is_wanted = variant in self.variants
        if not self._is_wanted:
            self._time(False)

    def time_where_wanted(self, repeats: bool) -> None:
        """Has the kernels of a batch timed, if its shapes come again and again and live trials ask for it."""
        self._time(self._is_wanted and repeats)

    def _time(self, is_on: bool) -> None:
        for switch in self._switches:
            (switch.apply if is_on else switch.undo)()

    @override
    def _apply(self) -> None:
        self._time(self._is_at_once)

    @override
    def _undo(self) -> None:
        self._is_wanted = False
        self._time(False)


@register(
    "cudnn_benchmark",
    options=CudnnBenchmarkSetting,
    default="auto",
    doc=(
        '``"off"`` leaves ``torch.backends.cudnn.benchmark`` as it is; ``"on"`` sets it while the run lasts; '
        '``"auto"`` has kernels timed for batches whose shapes repeat, on NVIDIA\'s cards, and live trials '
        "decide whether that pays. The plugin cannot see ``Trainer(benchmark=False)``, which is Lightning's "
        'default: give ``"off"``.'
    ),
    after="memory_format",
    before="compile",
    exactness="rounding",
)
class CudnnBenchmark(Technique):
    """Times kernels for convolutions on batches whose shapes have come before; new shapes run as they would have.

    With ``"auto"`` it is among the deterministic kernels that cuDNN chooses for those batches, and only for those:
    torch keeps one plan for a shape however it was found, so that a shape that has run is timed as another kind only.
    ``"on"`` has it choose among all.
    """

    traits = Traits(applied_before_trial=True, trial_step=None, remembers=False)

    def __init__(self, settings: CudnnBenchmarkSetting, context: BuildContext) -> None:
        self._is_auto = settings == "auto"
        self._patch: CudnnBenchmarkPatch | None = None
        self._seen: Counter[tuple[torch.Size, ...]] = Counter()
        self._when = "for batches whose shapes repeat" if self._is_auto else "for every shape"
        # Where it is not possible, nobody misses it: what else there is has other kernels.
        words = f"kernels of convolutions are timed {self._when}"
        self.run.forecast = Forecast(True, "tried" if self._is_auto else "yes", words, is_missed=False)

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind == "rocm" and self._is_auto:
            return "not measured on AMD's cards, where MIOpen takes its place"
        if host.kind not in ("cuda", "rocm"):
            return "cuDNN is NVIDIA's, and computes on GPUs only"
        is_asked_for = self.run.explicit and not torch.are_deterministic_algorithms_enabled()
        if torch.backends.cudnn.deterministic or not (self.run.decides_by_clock or is_asked_for):
            return "this run must not choose kernels by time"
        return None

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterator[Patch]:
        num_convolutions = sum(isinstance(module, CONVOLUTIONS) for module in model.modules())
        if torch.backends.cudnn.benchmark:
            yield Site("", why_not="torch.backends.cudnn.benchmark is True already")
        elif self._is_auto and not num_convolutions:
            yield Site("", why_not="this model has no convolutions")
        else:
            change = f"kernels of convolutions → timed, {self._when}"
            self._patch = CudnnBenchmarkPatch(change, with_own_plans=self._is_auto)
            if self._is_auto:
                # The host times kernels, and waits for each.
                self.run.live = Live(setup=ArmSetup(self.run, TIMING_S * num_convolutions))
            yield self._patch

    @override
    def batch(self, batch: Any, stage: str) -> Any:
        if self._is_auto and self._patch is not None:
            shapes = tuple(tensor.shape for tensor in tensors_in(batch))
            repeats = self._seen[shapes] >= max(REPEATED, LEAST_SHARE * self._seen.total())
            self._patch.time_where_wanted(repeats)
            self._seen[shapes] += 1
            if len(self._seen) > MANY_SHAPES:
                self._seen.clear()
        return batch
