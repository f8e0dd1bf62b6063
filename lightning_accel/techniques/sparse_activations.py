"""Sparse activations: what autograd saves and is mostly zeros, or a mask, is kept packed until the backward pass.

Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training" (2018),
https://doi.org/10.1109/ISCA.2018.00070, of which this takes the lossless part: gradients are a plain run's, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from typing_extensions import Self, override

from lightning_accel.core.measured import Measurement
from lightning_accel.memory.packer import Packer
from lightning_accel.memory.packing_budget import MAX_TIME_SHARE
from lightning_accel.memory.saved_tensors import saving
from lightning_accel.techniques.base import BuildContext, OomFallback, Technique, Traits
from lightning_accel.techniques.registry import register

_LEAVE_ZEROS = (nn.ReLU, nn.ReLU6, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

SparseSetting = Literal["auto", "off"]


def _oom_fallbacks(settings: SparseSetting, context: BuildContext) -> Iterator[OomFallback]:
    if settings == "off" and any(isinstance(module, _LEAVE_ZEROS) for module in context.model.modules()):
        yield OomFallback("auto", costs=MAX_TIME_SHARE)


@register("sparse_activations", options=SparseSetting, default="off", after="memory_format", exactness="exact")
class SparseActivations(Technique):
    """Packs the saved tensors of training steps where that frees memory and is worth its time.

    Its status says what it found, and changes in the course of the first steps. Decisions are local to a process and
    change no number, so ranks need not agree.
    """

    traits = Traits(
        acts_without_sites=True,
        not_on={
            "mps": "tensors are packed on CPUs, NVIDIA and AMD GPUs only. Use gradient_checkpointing to need less"
            " memory",
            "xla": "how large a packed tensor is depends on its values, and XLA compiles for sizes that are known"
            " before. Use torch_xla.utils.checkpoint to need less memory",
        },
        oom_fallbacks=_oom_fallbacks,
    )

    def __init__(self, model: nn.Module, *, packer: Packer | None = None) -> None:
        self.packer = packer or Packer()
        self.run.status = "waiting for the first step"
        self._model = model

    @classmethod
    @override
    def from_settings(cls, settings: SparseSetting, context: BuildContext) -> Self:
        return cls(context.model)

    @override
    @contextmanager
    def step(self, stage: str) -> Iterator[None]:
        if stage != "train" or not torch.is_grad_enabled():
            yield
            return
        self.packer.begin_step()
        try:
            with saving(self.packer, self._model):
                yield
        except BaseException:
            self.packer.abandon_step()
            raise
        self.packer.end_step()
        report = self.packer.report()
        self.run.status = str(report)
        if report.packed:
            self.run.measured = Measurement(original_bytes=report.before_bytes, candidate_bytes=report.after_bytes)
