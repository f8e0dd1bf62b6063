"""Written by `make stub` from what the techniques declare: see arguments.py."""

from collections.abc import Sequence
from typing import Any, Literal

from lightning_accel.data.transform import Transform
from lightning_accel.techniques.activation_offloading import OffloadingPlan
from lightning_accel.techniques.flash_attention.settings import FlashAttentionPlan
from lightning_accel.techniques.gradient_checkpointing.settings import CheckpointingPlan, MemoryBudgetPlan

class RunSettings:
    out_of_memory: str
    log: bool
    strict: bool
    verify: bool

class Arguments:
    def __init__(
        self,
        *,
        preprocess: Sequence[Transform | dict[str, Any]] | None = (),
        precision: Literal["auto", "32-true", "16-mixed", "bf16-mixed"] = "auto",
        flash_attention: Literal[
            "auto", "off", "sdpa", "cudnn", "flash", "efficient", "fa3", "fa4", "flash-attn", "flex"
        ]
        | FlashAttentionPlan
        | dict[str, Any]
        | bool = "auto",
        inplace_activations: Literal["auto", "off"] | bool = "auto",
        memory_format: Literal["auto", "off", "channels_last", "channels_last_3d"] | bool = "auto",
        sparse_activations: Literal["auto", "off"] | bool = "off",
        activation_offloading: Literal["auto", "off", "host", "disk"] | OffloadingPlan | dict[str, Any] | bool = "auto",
        gradient_checkpointing: Literal["off", "full", "selective"] | CheckpointingPlan | dict[str, Any] | bool = "off",
        memory_budget: int | float | str | MemoryBudgetPlan | dict[str, Any] | bool = "off",
        threads: Literal["off", "auto"] | int | bool = "off",
        compile: Literal[
            "off", "on", "auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
        ]
        | bool = "off",
        tune: Literal["auto", "off"] = "auto",
        out_of_memory: Literal["answer", "off"] = "answer",
        log: bool = True,
        strict: bool = False,
        verify: bool = True,
    ) -> None:
        """
        Args:
            preprocess: Transforms of :mod:`lightning_accel.data` that batches go through on the device, each
                prepared while the one before it is trained on (in YAML mappings of ``class_path`` and
                ``init_args``).
            precision: ``"auto"``: bfloat16 where the device computes in it natively, float16 with a gradient scaler
                on older CUDA cards, else float32.
            flash_attention: ``"auto"`` computes attention, however it was written, with a fused kernel wherever a
                trial finds the same numbers and no loss of speed; a backend (``"sdpa"``, ``"cudnn"``, ``"flash"``,
                ``"efficient"``, ``"fa3"``, ``"fa4"``, ``"flash-attn"``, ``"flex"``) wherever the numbers agree;
                ``"off"`` leaves attention alone. Or a :class:`FlashAttentionPlan`, in YAML a mapping of
                ``backend``, ``skip``, ``force``.
            inplace_activations: ``"auto"`` lets activation and dropout modules overwrite their input at every call
                where nobody else can read it, as counts of who holds it show; ``"off"``.
            memory_format: ``"auto"`` moves models with convolutions to channels_last where that is not slower; a
                named format is used wherever the numbers agree; ``"off"`` leaves every layout alone.
            sparse_activations: ``"auto"`` packs, without loss, saved tensors that are mostly zeros or masks where
                that is worth its time; ``"off"``.
            activation_offloading: ``"host"`` moves what is saved for the backward pass to pinned memory of the host
                and back, ``"disk"`` to a memory-mapped file. With a memory budget the planner decides which blocks
                do so: none with ``"off"``; with ``"auto"`` it may take the host's memory on a GPU, and without a
                budget nothing is moved. Or a :class:`OffloadingPlan`, in YAML a mapping of ``to``, ``min_bytes``,
                ``folder``.
            gradient_checkpointing: ``"full"`` recomputes a whole block in the backward pass; ``"selective"`` keeps
                what matrix products, convolutions and attention computed and recomputes the rest; ``"off"`` does
                nothing. Or a :class:`CheckpointingPlan`, in YAML a mapping of ``mode``, ``blocks``.
            memory_budget: The most memory that a training step may need, everything included: bytes, text such as
                ``"12GiB"``, or a fraction of the device. What each block does for it, keep its activations,
                recompute or offload them, is planned from what the first steps measure; ``"off"``: there is no
                limit. Or a :class:`MemoryBudgetPlan`, in YAML a mapping of ``budget``, ``blocks``.
            threads: ``"off"`` leaves them as they are; a number from 1 on; or ``"auto"``: half as many, a quarter
                and so on are tried on the run's own steps, and the fastest stays. ``lightning-accel tune`` finds it
                before a run.
            compile: ``"off"``; ``"on"`` compiles the repeated blocks; ``"auto"`` does so where a trial is faster;
                or a mode of :func:`torch.compile`.
            tune: ``"auto"``: what is kept is decided by whole training steps, while they train, so that the run is
                never slower than plain; ``"off"``: by the trials of the parts alone.
            out_of_memory: ``"answer"``: where a training step under Lightning runs out of memory, what needs less
                and changes no number (packing, checkpointing, offloading) is put on, and the step runs again; where
                that cannot be, the run ends with a page that names who asked, who held what, and what would fit.
                ``"off"``: it ends with the error as it is.
            log: Add :class:`~lightning_accel.callbacks.SpeedMemoryLogger` to the Trainer unless it has one.
            strict: Raise where the default is to warn and go on.
            verify: Try every change on the first batch and keep only those that agree with the original. Switched
                off, changes are applied untried.
        """
    def _configure(self, settings: dict[str, Any]) -> None: ...

class Values:
    preprocess: Sequence[Transform | dict[str, Any]] | None
    precision: Literal["auto", "32-true", "16-mixed", "bf16-mixed"]
    flash_attention: (
        Literal["auto", "off", "sdpa", "cudnn", "flash", "efficient", "fa3", "fa4", "flash-attn", "flex"]
        | FlashAttentionPlan
        | dict[str, Any]
        | bool
    )
    inplace_activations: Literal["auto", "off"] | bool
    memory_format: Literal["auto", "off", "channels_last", "channels_last_3d"] | bool
    sparse_activations: Literal["auto", "off"] | bool
    activation_offloading: Literal["auto", "off", "host", "disk"] | OffloadingPlan | dict[str, Any] | bool
    gradient_checkpointing: Literal["off", "full", "selective"] | CheckpointingPlan | dict[str, Any] | bool
    memory_budget: int | float | str | MemoryBudgetPlan | dict[str, Any] | bool
    threads: Literal["off", "auto"] | int | bool
    compile: (
        Literal["off", "on", "auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | bool
    )
    tune: Literal["auto", "off"]
    out_of_memory: Literal["answer", "off"]
    log: bool
    strict: bool
    verify: bool

def arguments() -> dict[str, tuple[Any, Any, str]]: ...
def described() -> str: ...
