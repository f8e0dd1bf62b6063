"""The settings of one run: what every technique is asked to do. Checked when made; to YAML and back without loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import yaml

from lightning_accel.core.byte_size import parse_bytes
from lightning_accel.core.checks import check_bool, check_choice, check_names, names_given
from lightning_accel.data import Transform
from lightning_accel.data.settings import read_transforms, written
from lightning_accel.memory.offload import Offloading
from lightning_accel.techniques.gradient_checkpointing.settings import CheckpointingMode as CheckpointingMode
from lightning_accel.techniques.gradient_checkpointing.settings import CheckpointingPlan as CheckpointingPlan

PrecisionSetting = Literal["auto", "32-true", "16-mixed", "bf16-mixed"]
MemoryFormatSetting = Literal["auto", "preserve", "channels_last", "channels_last_3d"]
OffloadingSetting = Literal["auto", "off", "host", "disk"]
SparseSetting = Literal["off", "auto"]
FlashAttentionSetting = Literal[
    "auto", "off", "sdpa", "cudnn", "flash", "efficient", "fa3", "fa4", "flash-attn", "flex"
]
CompileSetting = Literal[
    "off", "on", "auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]


@dataclass(frozen=True, kw_only=True)
class OffloadingPlan:
    """Activation offloading in detail: what ``activation_offloading`` takes when a place is not enough.

    Attributes:
        to: ``"host"``: pinned memory of the host; ``"disk"``: a memory-mapped file; ``"off"``; ``"auto"``: on a GPU
            with a memory budget as ``"host"``, else as ``"off"``.
        min_bytes: Saved tensors smaller than this stay on the device: bytes, or text such as ``"256KiB"``.
        folder: Where the file is made; None: the folder for temporary files.
    """

    to: OffloadingSetting = "host"
    min_bytes: int | str = 1 << 20
    folder: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", _switch(self.to))
        check_choice("activation_offloading.to", self.to, get_args(OffloadingSetting))
        parse_bytes("activation_offloading.min_bytes", self.min_bytes)
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(
                f"activation_offloading.folder={self.folder!r} is no folder. Allowed: one that exists, or None."
            )

    @property
    def always(self) -> bool:
        """Whether it is asked for, memory budget or not."""
        return self.to in ("host", "disk")

    def on(self, device_type: str) -> Offloading | None:
        """Where what a device saves may be offloaded to; None: nowhere. ``"auto"`` is the host's memory on a GPU."""
        to = ("host" if device_type == "cuda" else "off") if self.to == "auto" else self.to
        if to == "off":
            return None
        return Offloading(to, int(parse_bytes("activation_offloading.min_bytes", self.min_bytes)), self.folder)


@dataclass(frozen=True, kw_only=True)
class FlashAttentionPlan:
    """Flash attention site by site: what ``flash_attention`` takes when a backend is not enough.

    Attributes:
        backend: As ``flash_attention`` itself: ``"auto"``, a backend, ``"off"``.
        skip: Class names or module paths of attention, or of what holds it, that stays as it is.
        force: Those that are fused wherever the numbers agree, whatever the clock says.
    """

    backend: FlashAttentionSetting = "auto"
    skip: tuple[str, ...] = ()
    force: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", _read_backend("flash_attention.backend", self.backend))
        for name in ("skip", "force"):
            object.__setattr__(self, name, names_given(f"flash_attention.{name}", getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which techniques a run uses, and how. The same keys as :class:`~lightning_accel.AccelPlugin`'s arguments.

    YAML 1.1 reads a bare ``off`` or ``on`` as a boolean, so every switch takes ``False`` for ``"off"`` and, where
    there is one, ``True`` for ``"on"``.

    Attributes:
        precision: ``"auto"``: bfloat16 where the device computes in it natively, float16 with a gradient scaler on
            older CUDA cards, else float32.
        inplace_activations: Let activation and dropout modules overwrite their input at every call where nobody else
            can read it, as counts of who holds it show.
        memory_format: ``"auto"`` moves models with convolutions to channels_last where that is not slower;
            a named format is used wherever the numbers agree; ``"preserve"`` leaves every layout alone.
        gradient_checkpointing: ``"off"``, ``"full"``, ``"selective"``, or a :class:`CheckpointingPlan`
            (in YAML a mapping with ``mode`` and ``blocks``, or with a memory ``budget``).
        compile: ``"off"``; ``"on"`` compiles the repeated blocks; ``"auto"`` does so where a trial is faster;
            or a mode of :func:`torch.compile`.
        flash_attention: ``"auto"`` computes attention, however it was written, with a fused kernel wherever a trial
            finds the same numbers and no loss of speed; a backend (``"sdpa"``, ``"cudnn"``, ``"flash"``,
            ``"efficient"``, ``"fa3"``, ``"fa4"``, ``"flash-attn"``, ``"flex"``) wherever the numbers agree;
            ``"off"`` leaves attention alone; or a :class:`FlashAttentionPlan` (in YAML a mapping with ``backend``,
            ``skip`` and ``force``).
        activation_offloading: ``"host"`` moves what is saved for the backward pass to pinned host memory and back,
            ``"disk"`` to a memory-mapped file; or an :class:`OffloadingPlan` (in YAML a mapping with ``to``,
            ``min_bytes`` and ``folder``). With a memory budget the planner decides which blocks do so: none with
            ``"off"``; with ``"auto"`` it may take the host's memory on a GPU, and without a budget nothing is moved.
        sparse_activations: ``"auto"`` packs, without loss, saved tensors that are mostly zeros or masks where that
            is worth its time; ``"off"``.
        preprocess: Transforms of :mod:`lightning_accel.data` that batches go through on the device, each prepared
            while the one before it is trained on (in YAML mappings of ``class_path`` and ``init_args``).
        log: Add :class:`~lightning_accel.callbacks.SpeedMemoryLogger` to the Trainer unless it has one.
        strict: Raise where the default is to warn and go on.
        verify: Try every change on the first batch and keep only those that agree with the original. Switched off,
            changes are applied untried; in-place activations, which need the proof, are then left out.

    Raises:
        ValueError: A value is not among those allowed, or two settings contradict each other.
        TypeError: A value has the wrong type.
    """

    precision: PrecisionSetting = "auto"
    inplace_activations: bool = True
    memory_format: MemoryFormatSetting = "auto"
    gradient_checkpointing: CheckpointingMode | CheckpointingPlan | Mapping[str, Any] | bool = "off"
    compile: CompileSetting | bool = "off"
    flash_attention: FlashAttentionSetting | FlashAttentionPlan | Mapping[str, Any] | bool = "auto"
    activation_offloading: OffloadingSetting | OffloadingPlan | Mapping[str, Any] | bool = "auto"
    sparse_activations: SparseSetting | bool = "off"
    preprocess: Sequence[Transform | dict[str, Any]] = ()
    log: bool = True
    strict: bool = False
    verify: bool = True

    def __post_init__(self) -> None:
        for name in ("inplace_activations", "log", "strict", "verify"):
            check_bool(name, getattr(self, name))
        check_choice("precision", self.precision, get_args(PrecisionSetting))
        check_choice("memory_format", self.memory_format, get_args(MemoryFormatSetting))
        self._replace("gradient_checkpointing", _read_checkpointing(self.gradient_checkpointing))
        self._replace("compile", _switch(self.compile))
        check_choice("compile", self.compile, get_args(CompileSetting))
        self._replace("flash_attention", _read_attention(self.flash_attention))
        self._replace("activation_offloading", _read_offloading(self.activation_offloading))
        self._replace("sparse_activations", _named_switch(self.sparse_activations, on="auto"))
        check_choice("sparse_activations", self.sparse_activations, get_args(SparseSetting))
        self._replace("preprocess", read_transforms(self.preprocess))
        if self.compile == "auto" and not self.verify:
            raise ValueError(
                "compile='auto' keeps what a trial showed to be faster, and verify=False forbids trials:"
                " give compile='on' or 'off', or verify=True."
            )
        if self.checkpointing.budget is not None and self.compile != "off":
            raise ValueError(
                f"gradient_checkpointing={{'budget': {self.checkpointing.budget!r}}} with compile={self.compile!r}: the"
                " planner measures blocks as they run eagerly, and changes what they do. Give compile='off', or"
                " gradient_checkpointing='selective' or 'full'."
            )
        if self.offloading.always and self.compile in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"activation_offloading={self.offloading.to!r} with compile={self.compile!r}, which records CUDA"
                " graphs: their activations have fixed places in memory and cannot be moved."
                " Give compile='on' or 'max-autotune-no-cudagraphs', or activation_offloading='off'."
            )

    @property
    def checkpointing(self) -> CheckpointingPlan:
        """``gradient_checkpointing`` in its long form."""
        setting = self.gradient_checkpointing
        if isinstance(setting, CheckpointingPlan):
            return setting
        return CheckpointingPlan(mode=cast(CheckpointingMode, setting))

    @property
    def offloading(self) -> OffloadingPlan:
        """``activation_offloading`` in its long form."""
        setting = self.activation_offloading
        if isinstance(setting, OffloadingPlan):
            return setting
        return OffloadingPlan(to=cast(OffloadingSetting, setting))

    @property
    def attention(self) -> FlashAttentionPlan:
        """``flash_attention`` in its long form."""
        setting = self.flash_attention
        if isinstance(setting, FlashAttentionPlan):
            return setting
        return FlashAttentionPlan(backend=cast(FlashAttentionSetting, setting))

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """``preprocess`` as objects."""
        return cast(tuple[Transform, ...], self.preprocess)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values: valid keyword arguments of ``Plan`` and of ``AccelPlugin``."""
        values = asdict(replace(self, preprocess=()))  # copies what it finds, which some functions cannot be
        values["preprocess"] = [written(transform) for transform in self.transforms]
        if isinstance(self.gradient_checkpointing, CheckpointingPlan):
            given = values["gradient_checkpointing"]
            given["blocks"] = list(self.gradient_checkpointing.blocks)
            del given["budget" if given["budget"] is None else "mode"]
        if isinstance(self.flash_attention, FlashAttentionPlan):
            values["flash_attention"] |= {
                "skip": list(self.flash_attention.skip),
                "force": list(self.flash_attention.force),
            }
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan with these settings, defaults elsewhere.

        Raises:
            ValueError: A key is no setting of a plan; the nearest one is named.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"A plan is a mapping of settings to values, not {type(values).__name__}: {values!r}.")
        check_names(values, allowed=[field.name for field in fields(cls)], owner="a plan")
        return cls(**values)

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The plan as YAML text, written to ``path`` too when one is given."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_yaml(cls, source: str | Path) -> Plan:
        """Reads YAML text, or the file at a :class:`~pathlib.Path`."""
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        return cls.from_dict(yaml.safe_load(text) or {})

    def _replace(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _switch(value: Any) -> Any:
    return _named_switch(value, on="on")


def _named_switch(value: Any, *, on: str) -> Any:
    return {True: on, False: "off"}[value] if isinstance(value, bool) else value


def _read_checkpointing(value: Any) -> CheckpointingMode | CheckpointingPlan:
    if isinstance(value, CheckpointingPlan):
        return value
    if isinstance(value, Mapping):
        check_names(value, allowed=["mode", "blocks", "budget"], owner="gradient_checkpointing")
        if dict(value) == {"budget": None}:
            parse_bytes("gradient_checkpointing.budget", None, fractions=True)
        if value.get("mode", "full") != "full" and value.get("budget") is not None:
            raise ValueError(
                f"gradient_checkpointing={dict(value)!r}: a budget plans the mode of each block itself."
                " Give one of the two: {'budget': '12GiB'} or {'mode': 'full'}."
            )
        return CheckpointingPlan(**value)
    value = "off" if value is False else value
    more = "a mapping of mode and blocks, or of a budget as in {'budget': '12GiB'}"
    check_choice("gradient_checkpointing", value, get_args(CheckpointingMode), more=more)
    return cast(CheckpointingMode, value)


def _read_offloading(value: Any) -> OffloadingSetting | OffloadingPlan:
    if isinstance(value, OffloadingPlan):
        return value
    if isinstance(value, Mapping):
        check_names(value, allowed=["to", "min_bytes", "folder"], owner="activation_offloading")
        return OffloadingPlan(**value)
    value = _named_switch(value, on="host")
    more = "a mapping of to, min_bytes and folder"
    check_choice("activation_offloading", value, get_args(OffloadingSetting), more=more)
    return cast(OffloadingSetting, value)


def _read_attention(value: Any) -> FlashAttentionSetting | FlashAttentionPlan:
    if isinstance(value, FlashAttentionPlan):
        return value
    if isinstance(value, Mapping):
        check_names(value, allowed=["backend", "skip", "force"], owner="flash_attention")
        return FlashAttentionPlan(**value)
    return _read_backend("flash_attention", value)


def _read_backend(name: str, value: Any) -> FlashAttentionSetting:
    value = {True: "auto", False: "off"}[value] if isinstance(value, bool) else value
    more = "a mapping of backend, skip and force" if name == "flash_attention" else ""
    check_choice(name, value, get_args(FlashAttentionSetting), more=more)
    return cast(FlashAttentionSetting, value)
