"""Gives modules that were made on the meta device their memory and their first values, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_UNTOUCHED = 0xA5  # in every byte of memory that nothing has been written to


def materialize(
    root: nn.Module, modules: Sequence[nn.Module], device: torch.device, *, may_be_empty: bool = False
) -> None:
    """Makes the meta parameters and buffers of ``modules`` real, and initialises them.

    A module is initialised by its ``reset_parameters()``, as torch's own layers have it, and then by the
    ``_init_weights(module)`` of every module around it that has one, as models in the style of Hugging Face's do: these
    are called with modules that only hold others, too.
    Tied weights stay tied, with the values that their first owner gives them.

    Args:
        root: The whole model.
        modules: Parts of it; their children only where they are listed themselves.
        device: Where the memory is to be.
        may_be_empty: Whether what a checkpoint holds may be left without values.

    Raises:
        ValueError: Neither way gave a parameter or buffer its values.
    """
    meta = [module for module in modules if any(tensor.is_meta for _, tensor in _own_tensors(module))]
    if not meta:
        return
    names = {module: name for name, module in root.named_modules()}
    owners = _allocate(meta, device)
    made = set(meta)
    for module in reversed(modules):  # a module's own values after those of its children, as when they are constructed
        # What holds others may have values for them; not where some of them are real, or shards, already.
        if not all(part in made or not any(_own_tensors(part)) for part in module.modules()):
            continue
        tied = [tensor for _, tensor in _own_tensors(module) if owners.get(id(tensor), module) is not module]
        values = [tensor.detach().clone() for tensor in tied]
        for initialise in _initialisers(root, names[module], module, resets=module in made):
            initialise()
        with torch.no_grad():
            for tensor, value in zip(tied, values, strict=True):
                tensor.copy_(value)
    for module in meta:
        for name, tensor in _own_tensors(module):
            is_in_checkpoint = name not in module._non_persistent_buffers_set
            if not _is_untouched(tensor) or (may_be_empty and is_in_checkpoint):
                continue
            path = f"{names[module]}.{name}" if names[module] else name
            raise ValueError(
                f"{path!r} was made on the meta device, and nothing gives it a value. Give {type(module).__name__} a"
                f" reset_parameters() method that fills its own parameters and buffers"
                + (", or load a checkpoint: trainer.fit(..., ckpt_path=...)." if is_in_checkpoint else ".")
            )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _allocate(modules: Sequence[nn.Module], device: torch.device) -> dict[int, nn.Module]:
    """Gives the meta tensors memory; returns the first owner of each, by the tensor's id."""
    owners: dict[int, nn.Module] = {}
    made: dict[int, Tensor] = {}
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    real = made[id(tensor)] = _like(tensor, device)
                    owners[id(real)] = module
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]
    return owners


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    _bytes(empty).fill_(_UNTOUCHED)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _is_untouched(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.is_contiguous() and bool((_bytes(tensor.detach()) == _UNTOUCHED).all())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _initialisers(root: nn.Module, name: str, module: nn.Module, *, resets: bool) -> Iterator[Callable[[], Any]]:
    for method in ("reset_parameters", "_reset_parameters"):  # the latter in nn.MultiheadAttention
        if resets and callable(reset := getattr(module, method, None)):
            yield reset
            break
    path = name.split(".") if name else []
    for depth in range(len(path), -1, -1):
        init_weights = getattr(root.get_submodule(".".join(path[:depth])), "_init_weights", None)
        if callable(init_weights):

            def initialise(init_weights: Callable[[nn.Module], Any] = init_weights) -> Any:
                with torch.no_grad():
                    return init_weights(module)

            yield initialise
