"""One training step taken apart, in figures: which module's time, FLOPs, bytes and memory are whose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPTIMIZER = "(optimizer)"
"""What stands for a module where an optimizer is at its step."""

PARAMETERS, GRADIENTS, STATES, BUFFERS, BATCH = "parameters", "gradients", "optimizer states", "buffers", "the batch"
ACTIVATIONS = "activations kept for the backward pass"
LOGITS = "logits, and what their loss keeps"
COPIES = "copies of parameters in another dtype"
WORKSPACE = "workspace of the forward pass"
BACKWARD = "gradients of activations, and workspace of the backward pass"
STEPPING = "workspace of the optimizer"
WITHIN = "workspace that operations take and give back"


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """What was alive at the moment of a step at which most was.

    Attributes:
        peak_bytes: All of it: tensors' storages, each counted once; and, where the allocator was metered, what
            operations take and give back within themselves. What allocators hold beside is not among it.
        parts: Category → bytes; they add up to the peak.
        modules: Module → bytes of what its forward pass made, that were alive at the peak.
    """

    peak_bytes: int
    parts: Mapping[str, int]
    modules: Mapping[str, int]


@dataclass(kw_only=True)
class ModuleCost:
    """What one module's own operations took in a step, those of its parts left out.

    Attributes:
        module: Its qualified name; empty: the model's own.
        kind: Its class.
        forward_ms: Milliseconds of operations in the forward pass.
        backward_ms: The same of the backward pass.
        flops: Floating-point operations of both.
        moved_bytes: What these operations read and wrote.
        operations: How many they were.
        low_precision_flops: Of ``flops``, those on 16-bit or smaller numbers.
    """

    module: str
    kind: str
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    flops: int = 0
    moved_bytes: int = 0
    operations: int = 0
    low_precision_flops: int = 0


@dataclass(kw_only=True)
class LayoutCopy:
    """Copies that change nothing but strides.

    Attributes:
        module: Whose operations these are.
        line: Of the user's, where they are asked for; empty in the backward pass.
        made_by: The operation and the line that made a tensor of such strides; empty: not seen.
        moved_bytes: What they wrote.
        ms: What they took.
        count: How many.
    """

    module: str
    line: str
    made_by: str
    moved_bytes: int = 0
    ms: float = 0.0
    count: int = 0


@dataclass(kw_only=True)
class OperationsAlike:
    """Operations of a step that have about as much to do, by powers of two.

    Attributes:
        count: How many they are.
        ms: What they took.
        flops: Theirs.
        low_precision_flops: Of ``flops``, those on 16-bit or smaller numbers.
        moved_bytes: What they read and wrote of tensors that grow with the batch, where they are no products.
    """

    count: int = 0
    ms: float = 0.0
    flops: int = 0
    low_precision_flops: int = 0
    moved_bytes: int = 0


@dataclass(kw_only=True)
class Anatomy:
    """A step, taken apart.

    Attributes:
        step: Its number, as of :class:`~lightning_accel.evidence.record.Steps`.
        modules: Those with operations of their own, the most time first.
        copies: Of layouts, the most time first.
        waits: The user's line → how often in this step the host had to know a result of the device.
        memory: At the peak.
        operations: How many there were.
        operations_ms: What they took, without what lies between them.
        work_ms: The same without what the least of them take, which is what it costs to have one at all, and without
            the optimizer's: what grows with the batch.
        least_ms: What the least tenth of them took, each: what it costs to have one at all.
        alike: All but the optimizer's, by what they have to do.
        product_ms: What those took that have FLOPs.
    """

    step: int = 0
    modules: list[ModuleCost] = field(default_factory=list)
    copies: list[LayoutCopy] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    memory: MemoryPeak | None = None
    operations: int = 0
    operations_ms: float = 0.0
    work_ms: float = 0.0
    least_ms: float = 0.0
    alike: list[OperationsAlike] = field(default_factory=list)
    product_ms: float = 0.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Anatomy:
        """What :func:`dataclasses.asdict` gave.

        Raises:
            KeyError, TypeError: It did not.
        """
        memory = values["memory"]
        return cls(
            **{
                **values,
                "modules": [ModuleCost(**one) for one in values["modules"]],
                "alike": [OperationsAlike(**one) for one in values["alike"]],
                "copies": [LayoutCopy(**one) for one in values["copies"]],
                "memory": None if memory is None else MemoryPeak(**memory),
            }
        )
