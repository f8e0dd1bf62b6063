"""Allocates and initialises modules that were made on the meta device, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_accel.core.torch_private.modules import reset_method
from lightning_accel.core.torch_private.other_libraries import init_weights_method

_UNTOUCHED = 0xA5  # every byte of allocated memory before initialisation


def materialize(
    root: nn.Module, modules: Sequence[nn.Module], device: torch.device, *, may_be_empty: bool = False
) -> None:
    """Allocates and initialises the own meta parameters and buffers of ``modules``, not those of their children.

    A module is initialised by its ``reset_parameters()``, as torch's own layers are. Then every module that contains it
    and has an ``_init_weights(module)``, in the style of Hugging Face, is asked to initialise it, also if it is only a
    container. Tied weights stay tied, with the values of their first owner. With ``may_be_empty``, tensors that a
    checkpoint contains may stay without values.

    Raises:
        ValueError: Neither way gave a parameter or buffer its values.
    """
    meta = [module for module in modules if any(tensor.is_meta for _, tensor in own_tensors(module))]
    if not meta:
        return
    paths = {module: path for path, module in root.named_modules()}
    owners = _allocate(meta, device)
    made = set(meta)
    for module in reversed(modules):  # children before their module, as in construction
        # A container may initialise its parts, but not if some of these are real, or shards, already.
        if not all(part in made or not any(own_tensors(part)) for part in module.modules()):
            continue
        tied = [tensor for _, tensor in own_tensors(module) if owners.get(tensor, module) is not module]
        values = [tensor.detach().clone() for tensor in tied]
        if module in made and (reset := reset_method(module)) is not None:
            reset()
        with torch.no_grad():
            for around in _around(root, paths[module]):
                if (init_weights := init_weights_method(around)) is not None:
                    init_weights(module)
            for tensor, value in zip(tied, values, strict=True):
                tensor.copy_(value)
    for module in meta:
        for name, tensor in own_tensors(module):
            if not _is_untouched(tensor):
                continue
            is_in_checkpoint = name in module.state_dict()
            if may_be_empty and is_in_checkpoint:
                continue
            path = f"{paths[module]}.{name}" if paths[module] else name
            raise ValueError(
                f"{path!r} was made on the meta device, and nothing gives it a value. Give {type(module).__name__} a"
                f" reset_parameters() method that fills its own parameters and buffers"
                + (", or load a checkpoint: trainer.fit(..., ckpt_path=...)." if is_in_checkpoint else ".")
            )


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers that ``module`` holds itself, not those of its children."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _allocate(modules: Sequence[nn.Module], device: torch.device) -> dict[Tensor, nn.Module]:
    """Allocates the meta tensors; returns the first owner of each."""
    owners: dict[Tensor, nn.Module] = {}
    made: dict[Tensor, Tensor] = {}
    for module in modules:
        for name, tensor in list(own_tensors(module)):
            if not tensor.is_meta:
                continue
            if tensor not in made:
                made[tensor] = _like(tensor, device)
                owners[made[tensor]] = module
            setattr(module, name, made[tensor])
    return owners


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    _bytes(empty).fill_(_UNTOUCHED)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _is_untouched(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.is_contiguous() and bool((_bytes(tensor.detach()) == _UNTOUCHED).all())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _around(root: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yields the module at ``path``, then each module that contains it, up to ``root``."""
    names = path.split(".") if path else []
    for depth in range(len(names), -1, -1):
        yield root.get_submodule(".".join(names[:depth]))
