"""The ten settings of a run, which `Plan` and the plugins take, and the techniques that each of them sets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Literal

from typing_extensions import Never, Self, override

from lightning_accel.core.checks import nearest
from lightning_accel.core.options import Options
from lightning_accel.data.transform import Transform
from lightning_accel.techniques.activation_offloading import OffloadingOptions, OffloadingSetting
from lightning_accel.techniques.compilation import CompileSetting
from lightning_accel.techniques.gradient_checkpointing.budget import Budget
from lightning_accel.techniques.gradient_checkpointing.technique import CheckpointingMode
from lightning_accel.techniques.matmul_precision import MatmulPrecisionSetting
from lightning_accel.techniques.padding import Multiple
from lightning_accel.techniques.registry import declarations
from lightning_accel.techniques.sparse_activations import SparseSetting

PrecisionFormat = Literal["auto", "off", "32-true", "16-mixed", "bf16-mixed"]
Trust = Literal["measured", "checked", "unchecked"]


@dataclass(frozen=True, kw_only=True, repr=False)
class PrecisionOptions(Options):
    """The number formats of a step.

    Attributes:
        format: ``"auto"``: bfloat16 if the device computes in it natively, float16 with a gradient scaler on older CUDA
            cards, else float32. ``"off"`` is ``"32-true"``.
        matmul: The precision of float32 matrix products. ``"off"`` leaves it unchanged. ``"high"`` and ``"medium"`` are
            those of ``torch.set_float32_matmul_precision``: TF32 on NVIDIA's cards from Ampere on; on CPUs with
            AVX512-BF16 or AMX, ``"medium"`` is bfloat16. ``"auto"`` uses what the machine has if ``format`` is
            ``"auto"``, nobody has set the precision, and the model does not switch autocast off to compute in float32.
    """

    format: PrecisionFormat = "auto"
    matmul: MatmulPrecisionSetting = "auto"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "off":
            object.__setattr__(self, "format", "32-true")


@dataclass(frozen=True, kw_only=True, repr=False)
class CompileOptions(Options):
    """Compilation and CUDA graphs. A run has at most one of them.

    Attributes:
        mode: ``"on"`` compiles the repeated blocks, or else each module of several layers. ``"auto"`` does so if live
            trials find whole steps to be faster and the run is long enough to recover the compilation time. Or a mode
            of :func:`torch.compile`.
        graphs: ``"on"`` captures the repeated blocks in CUDA graphs and replays these while shapes stay the same.
            ``"auto"`` keeps graphs if live trials find whole steps to be faster, and worth the memory.
    """

    mode: CompileSetting = "off"
    graphs: Literal["auto", "on", "off"] = "off"


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryOptions(Options):
    """Ways to need less memory. None of them changes a number.

    Attributes:
        budget: The most memory that a training step may need, everything included: ``"12GiB"``, or a share of the
            device, ``"40%"``. The planner chooses what each block does from measurements of the first steps.
        checkpoint: ``"full"`` recomputes a whole block in the backward pass; ``"selective"`` keeps the outputs of
            matrix products, convolutions and attention and recomputes the rest.
        blocks: Class names or module paths of the blocks that a budget plans or that are checkpointed. If empty, the
            model's repeated blocks are found automatically.
        offload: ``"host"`` moves tensors saved for the backward pass to pinned host memory and back, ``"disk"`` to a
            file; ``"auto"`` lets the planner of a budget do so on a GPU. Or :class:`OffloadingOptions`.
        pack: ``"auto"`` packs, without loss, saved tensors that are mostly zeros or masks.
        on_oom: ``"answer"``: if a training step under Lightning runs out of memory, techniques that need less are put
            on and the step runs again. If that is impossible, the run ends with a page that shows what held the memory.
            ``"split"``: the same, and if no technique is left, batches go through ``training_step`` in parts. The
            gradients are those of the whole batch if the loss is a mean over samples and no batch norm trains.
            ``"off"``: the run ends with the original error.
    """

    budget: Budget = "off"
    checkpoint: CheckpointingMode = "off"
    blocks: tuple[str, ...] = ()
    offload: OffloadingSetting | OffloadingOptions = "auto"
    pack: SparseSetting = "off"
    on_oom: Literal["answer", "split", "off"] = "answer"

    @classmethod
    @override
    def read(cls, value: Any, name: str = "") -> Self:
        if value is True or (isinstance(value, str) and value == "auto"):
            return cls()
        if value is False or (isinstance(value, str) and value == "off"):
            return cls(offload="off", on_oom="off")
        if isinstance(value, str) and not any(map(str.isdigit, value)):
            names = "=, ".join(field.name for field in fields(cls))
            raise ValueError(
                f"memory={value!r}{nearest(value, ['auto', 'off']) or '.'} Allowed: 'auto', 'off', an amount such as"
                f" '12GiB' or '40%', MemoryOptions({names}=)."
            )
        return super().read(value, name)

    @override
    def short(self) -> Any:
        return {MemoryOptions(): "auto", MemoryOptions.read("off"): "off"}.get(self) or super().short()


@dataclass(frozen=True, kw_only=True, repr=False)
class LoaderOptions(Options):
    """Data loading for training, and the padding of text batches.

    Attributes:
        workers: ``"auto"`` measures in the first epoch of a Trainer's run how long it waits for data, and tries more
            workers from epoch to epoch while that is faster. The order stays the same. It applies only to data that
            draw no random numbers and do not change as they are read. ``"on"`` is ``"auto"``.
        padding: A number pads the sequences of every training batch to a multiple of it. ``"auto"`` pads to the largest
            multiple that suits the device's kernels and makes a batch at most an eighth longer. Batches are mappings as
            in transformers: ``input_ids``, an ``attention_mask`` that excludes the padding, and ``labels`` in which the
            loss ignores -100. Steps that draw random numbers are not padded: it would change dropout.
        group_by_length: Whether batches are made of samples of similar length, which need less padding. **It changes
            the training**: other samples share a batch. Each is used as often as before.
    """

    workers: Literal["auto", "on", "off"] = "off"
    padding: Multiple = "off"
    group_by_length: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers == "on":
            object.__setattr__(self, "workers", "auto")


GROUPS: dict[str, type[Options]] = {
    "precision": PrecisionOptions,
    "compile": CompileOptions,
    "memory": MemoryOptions,
    "loader": LoaderOptions,
}
"""The settings that take options, and the class of each."""

_PLACES = {
    "preprocess": ("preprocess",),
    "precision": ("precision", "format"),
    "matmul_precision": ("precision", "matmul"),
    "compile": ("compile", "mode"),
    "graphs": ("compile", "graphs"),
    "memory_budget": ("memory", "budget", "blocks"),
    "gradient_checkpointing": ("memory", "checkpoint", "blocks"),
    "activation_offloading": ("memory", "offload"),
    "sparse_activations": ("memory", "pack"),
    "loader": ("loader", "workers"),
    "padding": ("loader", "padding", "group_by_length"),
}


def place_of(technique: str) -> tuple[str, ...]:
    """Returns the setting that sets a technique, then the names of its options there, in the technique's own order."""
    changes_training = declarations()[technique].exactness == "changes training"
    return _PLACES.get(technique) or (("lossy",) if changes_training else ("techniques",))


def written(technique: str, value: Any) -> str:
    """Formats a technique's setting: ``memory=MemoryOptions(checkpoint='full')``, ``techniques={'loss': 'off'}``."""
    setting, *options = place_of(technique)
    if setting in ("techniques", "lossy"):
        return f"{setting}={{{technique!r}: {value!r}}}"
    if not options or options[0] == GROUPS[setting].switch():
        return f"{setting}={value!r}"
    return f"{setting}={GROUPS[setting].__name__}({options[0]}={value!r})"


class Arguments:
    """Base class that takes the ten settings as keyword arguments.

    Attributes:
        complaint: The message of the last refused settings.
    """

    complaint = ""

    def __init__(
        self,
        *,
        precision: PrecisionFormat | PrecisionOptions | dict[str, Any] | bool = "auto",
        compile: CompileSetting | CompileOptions | dict[str, Any] | bool = "off",
        memory: str | MemoryOptions | dict[str, Any] | bool = "auto",
        techniques: Mapping[str, Any] = {},
        preprocess: Sequence[Transform | dict[str, Any]] | None = (),
        loader: Literal["off", "auto", "on"] | LoaderOptions | dict[str, Any] | bool = "off",
        lossy: Mapping[str, Any] = {},
        trust: Trust = "measured",
        report: bool | str | PathLike[str] = True,
        strict: bool = False,
        **others: Never,
    ) -> None:
        """
        Args:
            precision: ``"auto"``: bfloat16 if the device computes in it natively, float16 with a gradient scaler on
                older CUDA cards, else float32; ``"off"``, which is ``"32-true"``; ``"16-mixed"``; ``"bf16-mixed"``. Or
                :class:`PrecisionOptions`: ``format``, ``matmul``.
            compile: ``"off"``; ``"on"`` compiles blocks; ``"auto"`` does so if live trials find whole steps to be
                faster; or a mode of :func:`torch.compile`. Or :class:`CompileOptions`: ``mode``, ``graphs``.
            memory: ``"auto"`` puts on what needs less memory when a training step runs out of memory; ``"off"`` does
                nothing; ``"12GiB"`` or ``"40%"`` of the device is the most that a training step may need. Or
                :class:`MemoryOptions`: ``budget``, ``checkpoint``, ``blocks``, ``offload``, ``pack``, ``on_oom``.
            techniques: The values of techniques that have no setting of their own, by name: ``{"loss": "off",
                "flash_attention": "sdpa"}``.
            preprocess: Transforms of :mod:`lightning_accel.data`, applied to batches on the device. Each batch is
                prepared while the one before it is trained on. In YAML: mappings of ``class_path`` and ``init_args``.
            loader: ``"off"``; ``"auto"`` or ``"on"`` tries more workers from epoch to epoch while that is faster. Or
                :class:`LoaderOptions`: ``workers``, ``padding``, ``group_by_length``.
            lossy: The same as ``techniques`` for those that change training beyond rounding: ``{"float8":
                "tensorwise"}``.
            trust: ``"measured"`` tests the numbers of every change on the first batch, and its speed on whole training
                steps during the training; a change stays only if it is faster. ``"checked"`` tests the numbers alone.
                ``"unchecked"`` applies changes without a test.
            report: ``True`` adds a :class:`~lightning_accel.callbacks.SpeedMemoryLogger` unless the Trainer has one;
                ``False`` does not. The name of a file that ends in ``.html``, ``.md`` or ``.json`` makes each fit write
                its report there, too, or beside the run's record if the file cannot be written.
            strict: Whether to raise an error in place of a warning.
            others: Not allowed; the error names the nearest setting.
        """
        settings = {name: value for name, value in locals().items() if name in DEFAULTS}
        try:
            for name, value in dict[str, Any](others).items():
                raise TypeError(unknown(type(self).__name__, name, value))
            self._configure(settings)
        except (TypeError, ValueError) as error:
            Arguments.complaint = str(error)
            raise

    def _configure(self, settings: dict[str, Any]) -> None:
        """Sets up the subclass with the settings."""


_PARAMETERS = list(inspect.signature(Arguments.__init__, eval_str=True).parameters.values())[:-1]
DEFAULTS: dict[str, Any] = {one.name: one.default for one in _PARAMETERS[1:]}
"""The ten settings and their defaults."""

# Lightning's command line accepts every value, so that the one-line error comes from here.
Arguments.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_PARAMETERS[0], *(one.replace(annotation=one.annotation | Any) for one in _PARAMETERS[1:])], return_annotation=None
)


def unknown(owner: str, name: str, value: Any) -> str:
    """Returns the error message for a setting that does not exist."""
    if name in declarations():
        return f"{owner} has no setting {name!r}: {written(name, value)} sets it."
    return f"{owner} has no setting {name!r}{nearest(name, list(DEFAULTS)) or '.'} Allowed: {', '.join(DEFAULTS)}."
