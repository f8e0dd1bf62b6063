"""Written by `make stub` from what the techniques declare: see arguments.py."""

from collections.abc import Sequence
from typing import Any, Literal

from lightning_accel.data.transform import Transform
from lightning_accel.techniques.activation_offloading import OffloadingPlan
from lightning_accel.techniques.flash_attention.settings import FlashAttentionPlan
from lightning_accel.techniques.gradient_checkpointing.settings import CheckpointingPlan, MemoryBudgetPlan
from lightning_accel.techniques.padding import PaddingPlan

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
        float8: Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp"] | bool = "off",
        loss: Literal["auto", "on", "off"] | bool = "auto",
        matmul_precision: Literal["off", "auto", "high", "medium"] | bool = "auto",
        memory_format: Literal["auto", "off", "channels_last", "channels_last_3d"] | bool = "auto",
        cudnn_benchmark: Literal["auto", "on", "off"] | bool = "auto",
        optimizer_8bit: Literal["off", "on"] | bool = "off",
        optimizer: Literal["auto", "off", "foreach", "fused"] | bool = "auto",
        padding: Literal["auto", "off"] | int | PaddingPlan | dict[str, Any] | bool = "off",
        loader: Literal["auto", "off"] | bool = "off",
        sparse_activations: Literal["auto", "off"] | bool = "off",
        activation_offloading: Literal["auto", "off", "host", "disk"] | OffloadingPlan | dict[str, Any] | bool = "auto",
        gradient_checkpointing: Literal["off", "full", "selective"] | CheckpointingPlan | dict[str, Any] | bool = "off",
        memory_budget: int | float | str | MemoryBudgetPlan | dict[str, Any] | bool = "off",
        graphs: Literal["auto", "on", "off"] | bool = "off",
        threads: Literal["auto", "off"] | int | bool = "off",
        compile: Literal[
            "off", "on", "auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
        ]
        | bool = "off",
        allocator: Literal["auto", "off"] | bool = "auto",
        tune: Literal["auto", "off"] = "auto",
        out_of_memory: Literal["answer", "split", "off"] = "answer",
        report: str = "off",
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
            float8: ``"off"``; or one of torchao's: ``"tensorwise"``, a scale a tensor, the fastest; ``"rowwise"``,
                a scale a row; ``"rowwise_with_gw_hp"``, which leaves the gradients of weights out, the most exact.
                It changes training: layers that are faster so have it while they train, and the report says what
                each is off by.
            loss: ``"auto"`` computes the loss of large vocabularies in pieces, without the logits, where they are
                asked for nothing else and that is not slower; ``"on"`` also where it is; ``"off"``.
            matmul_precision: ``"off"`` leaves it as it is; ``"high"`` and ``"medium"`` are those of
                ``torch.set_float32_matmul_precision``: TF32 for both on NVIDIA's cards from Ampere on, and on CPUs
                with AVX512-BF16 or AMX ``"medium"`` is bfloat16. ``"auto"`` takes what the machine has, where
                ``precision`` is ``"auto"``, too, nobody has set this precision, and the model does not switch
                autocast off to compute something in float32; and has it from a training step to the next step that
                does not train.
            memory_format: ``"auto"`` moves models with convolutions to channels_last where that is not slower; a
                named format is used wherever the numbers agree; ``"off"`` leaves every layout alone.
            cudnn_benchmark: ``"off"`` leaves ``torch.backends.cudnn.benchmark`` as it is; ``"on"`` sets it while
                the run lasts; ``"auto"`` has kernels timed for batches whose shapes repeat, on NVIDIA's cards, and
                live trials decide whether that pays. ``Trainer(benchmark=False)`` cannot be told from nothing said:
                give ``"off"``.
            optimizer_8bit: ``"on"`` keeps the moments of torch's Adam and AdamW in 8 bits while the run lasts, by
                torchao; it changes training, and the report says by how much. Checkpoints have floats. ``"off"``.
            optimizer: ``"fused"``: all parameters of a group in one kernel; ``"foreach"``: each operation on all of
                them at once; ``"auto"`` tries both on the run's own steps, and the fastest stays, and takes
                torch_xla's steps under XLA; ``"off"``. Groups for which the user has chosen ``foreach``, ``fused``,
                ``capturable`` or ``differentiable`` are left as they are.
            padding: A number pads the sequences of every training batch to a multiple of it; ``"auto"`` to the
                largest that the device's kernels like and that makes a batch at most an eighth longer; ``"off"``.
                Batches are mappings as transformers have them: ``input_ids``, an ``attention_mask`` that keeps the
                padding out, and ``labels`` of which the loss ignores -100. From the second step on, and only while
                steps draw no random numbers: for other shapes dropout would draw others. Or a :class:`PaddingPlan`,
                in YAML a mapping of ``multiple``, ``group_by_length``.
            loader: ``"auto"`` measures in the first epoch of a Trainer's run how long it waits for data, and tries
                more workers from epoch to epoch while that is faster: in the same order, and only for data that
                draw no random numbers and do not change as they are read. ``"off"``.
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
            graphs: ``"off"``; ``"on"`` captures the repeated blocks, forward and backward, and replays them where
                shapes stay; ``"auto"`` keeps that where live trials find whole steps to be faster, and the memory
                worth it.
            threads: ``"off"`` leaves them as they are; a number from 1 on; or ``"auto"``: half as many, a quarter
                and so on are tried on the run's own steps, and the fastest stays. ``lightning-accel tune`` finds it
                before a run.
            compile: ``"off"``; ``"on"`` compiles the repeated blocks; ``"auto"`` does so where live trials find
                whole steps to be faster, and the run is long enough to win back what compiling takes, and on NVIDIA
                GPUs has CUDA graphs of the compiled blocks where that is faster still; or a mode of
                :func:`torch.compile`.
            allocator: ``"auto"`` has the heap of glibc keep what is freed, where steps on the CPU ask the system
                for pages again and again; ``"off"`` leaves it alone. Other allocators: ``lightning-accel run``.
            tune: ``"auto"``: what is kept is decided by whole training steps, while they train, so that the run is
                never slower than plain; ``"off"``: by the trials of the parts alone.
            out_of_memory: ``"answer"``: where a training step under Lightning runs out of memory, what needs less
                and changes no number (packing, checkpointing, offloading) is put on, and the step runs again; where
                that cannot be, the run ends with a page that names who asked, who held what, and what would fit.
                ``"split"``: the same, and where nothing is left to put on, batches go through ``training_step`` in
                halves, quarters, and so on, within one step; gradients are those of the whole batch where the loss
                is a mean over samples and no batch norm trains. ``"off"``: it ends with the error as it is.
            report: A file that ends in ``.html``, ``.md`` or ``.json``, in which each fit leaves its report: what
                it has come to, where its time and memory went, what to do next. Where it cannot be written, it is
                beside the run's record. ``"off"``: none, but for a run that dies of a lack of memory, which leaves
                one beside its record.
            log: Have a :class:`~lightning_accel.callbacks.SpeedMemoryLogger` tell the loggers, unless a callback
                does.
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
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp"] | bool
    loss: Literal["auto", "on", "off"] | bool
    matmul_precision: Literal["off", "auto", "high", "medium"] | bool
    memory_format: Literal["auto", "off", "channels_last", "channels_last_3d"] | bool
    cudnn_benchmark: Literal["auto", "on", "off"] | bool
    optimizer_8bit: Literal["off", "on"] | bool
    optimizer: Literal["auto", "off", "foreach", "fused"] | bool
    padding: Literal["auto", "off"] | int | PaddingPlan | dict[str, Any] | bool
    loader: Literal["auto", "off"] | bool
    sparse_activations: Literal["auto", "off"] | bool
    activation_offloading: Literal["auto", "off", "host", "disk"] | OffloadingPlan | dict[str, Any] | bool
    gradient_checkpointing: Literal["off", "full", "selective"] | CheckpointingPlan | dict[str, Any] | bool
    memory_budget: int | float | str | MemoryBudgetPlan | dict[str, Any] | bool
    graphs: Literal["auto", "on", "off"] | bool
    threads: Literal["auto", "off"] | int | bool
    compile: (
        Literal["off", "on", "auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | bool
    )
    allocator: Literal["auto", "off"] | bool
    tune: Literal["auto", "off"]
    out_of_memory: Literal["answer", "split", "off"]
    report: str
    log: bool
    strict: bool
    verify: bool

def arguments() -> dict[str, tuple[Any, Any, str]]: ...
def described() -> str: ...
