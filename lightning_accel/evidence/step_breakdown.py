"""One training step taken apart, in figures: which module's time, FLOPs, bytes and memory are whose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(kw_only=True)
class MemoryPeaked:
    """What was alive at the moment of a step at which most was."""

    step: int = 0  # its number, as of `StepMeasured`
    # All of it: tensors' storages, each counted once; and, where the allocator was metered, what operations take and
    # give back within themselves. What allocators hold beside is not among it.
    peak_bytes: int
    parts: Mapping[str, int]  # category → bytes; they add up to the peak
    modules: Mapping[str, int]  # module → bytes of what its forward pass made, that were alive at the peak


@dataclass(kw_only=True)
class ModuleCost:
    """What one module's own operations took in a step, those of its parts left out."""

    module: str  # its qualified name; empty: the model's own
    kind: str  # its class
    forward_ms: float = 0.0  # milliseconds of operations in the forward pass
    backward_ms: float = 0.0  # the same of the backward pass
    flops: int = 0  # floating-point operations of both
    moved_bytes: int = 0  # what these operations read and wrote
    operations: int = 0  # how many they were
    low_precision_flops: int = 0  # of `flops`, those on 16-bit or smaller numbers


@dataclass(kw_only=True)
class LayoutCopy:
    """Copies that change nothing but strides."""

    module: str  # whose operations these are
    line: str  # of the user's, where they are asked for; empty in the backward pass
    made_by: str  # the operation and the line that made a tensor of such strides; empty: not seen
    moved_bytes: int = 0  # what they wrote
    ms: float = 0.0  # what they took
    count: int = 0  # how many


@dataclass(kw_only=True)
class OperationsAlike:
    """Operations of a step that have about as much to do, by powers of two."""

    count: int = 0  # how many they are
    ms: float = 0.0  # what they took
    flops: int = 0  # theirs
    low_precision_flops: int = 0  # of `flops`, those on 16-bit or smaller numbers
    moved_bytes: int = 0  # what they read and wrote of tensors that grow with the batch, where they are no products


@dataclass(kw_only=True)
class Anatomy:
    """A step, taken apart."""

    step: int = 0  # its number, as of `StepMeasured`
    modules: list[ModuleCost] = field(default_factory=list)  # those with operations of their own, the most time first
    copies: list[LayoutCopy] = field(default_factory=list)  # of layouts, the most time first
    # The user's line → how often in this step the host had to know a result of the device.
    waits: dict[str, int] = field(default_factory=dict)
    operations: int = 0  # how many there were
    operations_ms: float = 0.0  # what they took, without what lies between them
    # The same without what the least of them take, which is what it costs to have one at all, and without the
    # optimizer's: what grows with the batch.
    work_ms: float = 0.0
    least_ms: float = 0.0  # what the least tenth of them took, each: what it costs to have one at all
    alike: list[OperationsAlike] = field(default_factory=list)  # all but the optimizer's, by what they have to do
    product_ms: float = 0.0  # what those took that have FLOPs
