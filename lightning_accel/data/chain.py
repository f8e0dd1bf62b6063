"""`Preprocess`: a list of transforms at work on the batches of one device, as few passes over memory as it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lightning_accel.data import batch_paths
from lightning_accel.data.batch import ArrayBatch, Finish, Position
from lightning_accel.data.batch_paths import Path
from lightning_accel.data.color import ColorJitter, Normalize
from lightning_accel.data.geometry import RandomCrop
from lightning_accel.data.single_pass import Kind, SinglePass, run_on_gpu, run_on_host
from lightning_accel.data.tensor_arrays import Array, CupyArrays, NumpyArrays, why_no_cupy, writable
from lightning_accel.data.transform import FusibleTransform, Shape, Transform


class Preprocess:
    """Transforms, applied one after another to batches of tensors on a device.

    Crops, flips and a normalisation that stand together run as one pass over memory, from uint8 to the step's dtype
    and layout, with the same random numbers and the same result.

    On a CUDA device with CuPy the batches are transformed there, by kernels on torch's current stream and in memory of
    torch's allocator. On a CPU NumPy works on the tensors' own memory. Elsewhere, NumPy works on the host before the
    transfer (:attr:`on_host`), and :attr:`complaint` says why.

    Args:
        transforms: In the order in which they act.
        device: Of the model.
        dtype: What the step computes in: normalised images are given it.
        channels_last: Whether normalised images are laid out so; or a function that tells, asked at each batch.
        seed: Random numbers are derived from it and a batch's position; None: that of ``torch.manual_seed``.
        rank: Of this process: each has other random numbers.
        fuse: Whether to join transforms into single passes.

    Attributes:
        on_host: Whether batches are to be given to it before their transfer to the device.
        complaint: Why CuPy is not used on a CUDA device, with the mend; empty where nothing is missing.

    Raises:
        TypeError: One of ``transforms`` is no transform.
        ValueError: Their order makes no sense.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool | Callable[[], bool] = False,
        seed: int | None = None,
        rank: int = 0,
        fuse: bool = True,
    ) -> None:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"Preprocess(dtype={dtype}): allowed: torch.float32, torch.float16, torch.bfloat16.")
        self.transforms = checked(transforms)
        self.device = torch.device(device)
        self.complaint = (why_no_cupy(self.device) or "") if self.device.type == "cuda" else ""
        self._uses_cupy = self.device.type == "cuda" and not self.complaint
        self.on_host = self.device.type != "cpu" and not self._uses_cupy
        self._dtype = dtype
        self._channels_last = channels_last if callable(channels_last) else lambda: channels_last
        self._seed = torch.initial_seed() if seed is None else seed
        self._rank = rank
        self._fuse = fuse
        self._steps = _joined(self.transforms) if fuse else [(transform,) for transform in self.transforms]

    def __call__(self, batch: Any, position: Position | None = None) -> Any:
        """The batch transformed; the one that was passed in is left as it was, but for what a ``Map`` writes into it.

        Args:
            batch: Tensors in any structure, on the device (or on the host, where :attr:`on_host`).
            position: Where it stands in the run; None: the first batch of training.

        Raises:
            ValueError: A transform cannot find its part of the batch, or take its shape.
            TypeError: A transform cannot take the dtype of its part.
        """
        position = position or Position()
        rng = position.generator(self._seed, self._rank) if position.training else None
        arrays = CupyArrays(self.device) if self._uses_cupy else NumpyArrays()
        with torch.no_grad(), arrays.running():
            work = ArrayBatch(batch, arrays, rng, self._channels_of(batch))
            for step in self._steps:
                self._run(step, work)
            return work.finished()

    def describe(self) -> str:
        """In a line: the transforms, those in brackets in one pass, and who computes them."""
        names = [" + ".join(type(transform).__name__ for transform in step) for step in self._steps]
        shown = ", ".join(f"[{name}]" if " + " in name else name for name in names)
        library = "CuPy" if self._uses_cupy else "NumPy"
        place = "on the host, before the transfer" if self.on_host else f"on {self.device}"
        return f"{shown} with {library} {place}"

    def _channels_of(self, batch: Any) -> dict[Path, int]:
        """How many channels the images have that are to be normalised, as far as they are there yet."""
        found: dict[Path, int] = {}
        for transform in self.transforms:
            if isinstance(transform, Normalize) and transform.channels is not None:
                with suppress(ValueError, TypeError):  # it says so itself when it is its turn
                    found.setdefault(transform.find(batch), transform.channels)
        return found

    def _run(self, step: Sequence[Transform], work: ArrayBatch) -> None:
        normalize = _normalize_in(step)
        if normalize is None:
            step[0](work)
            return
        path = normalize.find(work.structure)
        images, is_nhwc = normalize.images(work, path)
        as_nchw = torch.channels_last if is_nhwc or self._channels_last() else torch.contiguous_format
        finish = Finish(
            dtype=torch.float32 if normalize.dtype == "float32" else self._dtype,
            memory_format=torch.contiguous_format if is_nhwc else as_nchw,
        )
        if self._fuse:
            dtype = finish.dtype if step is self._steps[-1] else torch.float32  # as what is to come works in
            out = _in_one_pass(step, images, work, dtype, as_nchw)
            work.write(path, out.permute(0, 2, 3, 1) if is_nhwc else out, in_float32=True)
        else:
            normalize(work)
            work.write(path, work.read(path), in_float32=True)
        work.finishes[path] = finish


def checked(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """``transforms``; a TypeError where one is none, a ValueError where one comes after what it cannot follow."""
    if not isinstance(transforms, list | tuple):
        raise TypeError(
            f"preprocess={transforms!r} is of type {type(transforms).__name__}. Allowed: a list of transforms, such as"
            " [Normalize(0.5, 0.25)]."
        )
    normalized = set()
    for transform in transforms:
        if isinstance(transform, type) and issubclass(transform, Transform):
            raise TypeError(f"preprocess: {transform.__name__} is a class: write {transform.__name__}(...).")
        if not isinstance(transform, Transform):
            raise TypeError(
                f"preprocess: {transform!r} is of type {type(transform).__name__}. Allowed: the transforms of"
                " lightning_accel.data; a function of your own goes into Map(fn); in YAML {class_path: Normalize, ...}."
            )
        if isinstance(transform, Normalize):
            normalized.add(transform.key)
        if isinstance(transform, ColorJitter) and transform.key in normalized:
            raise ValueError(
                "preprocess: ColorJitter after Normalize: it works on colours from 0 to 1. Put it before Normalize."
            )
    return tuple(transforms)


def _joined(transforms: Sequence[Transform]) -> list[tuple[Transform, ...]]:
    """The chain in steps: those of several transforms, and those of a lone Normalize, run in one pass over memory."""
    runs: list[list[Transform]] = []
    for transform in transforms:
        if runs and _can_join(runs[-1], transform):
            runs[-1].append(transform)
        else:
            runs.append([transform])
    steps: list[tuple[Transform, ...]] = []
    for run in runs:
        steps += [tuple(run)] if _normalize_in(run) else [(transform,) for transform in run]
    return steps


def _normalize_in(transforms: Sequence[Transform]) -> Normalize | None:
    return next((transform for transform in transforms if isinstance(transform, Normalize)), None)


def _can_join(run: Sequence[Transform], transform: Transform) -> bool:
    first = run[0]
    if not isinstance(first, FusibleTransform) or not isinstance(transform, FusibleTransform):
        return False
    # One pass has one kind of padding, and one scale and bias.
    is_taken = isinstance(transform, Normalize | RandomCrop) and type(transform) in map(type, run)
    return transform.key == first.key and not is_taken


def _in_one_pass(
    step: Sequence[Transform], images: Array, work: ArrayBatch, dtype: torch.dtype, memory_format: torch.memory_format
) -> Tensor:
    if images.dtype not in (np.uint8, np.float32):
        images = images.astype(np.float32)
    samples, channels, *_ = images.shape
    onto = SinglePass.copying(*images.shape, is_uint8=images.dtype == np.uint8)
    for transform in cast(Sequence[FusibleTransform], step):
        drawn = transform.draw(Shape(samples, channels, onto.height, onto.width), work.rng)
        if drawn is not None:
            transform.compose(onto, drawn)
    out = work.arrays.empty((samples, channels, onto.height, onto.width), dtype, memory_format)
    kind = cast(Kind, batch_paths.kind_of(out))
    if isinstance(work.arrays, NumpyArrays):
        run_on_host(images, onto, writable(work.arrays, out), kind=kind)
    elif samples:
        channels_last = memory_format == torch.channels_last
        run_on_gpu(images, onto, writable(work.arrays, out), kind=kind, channels_last=channels_last)
    return out
