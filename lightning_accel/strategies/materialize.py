"""Gives modules that were made on the meta device their memory and their first values, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def materialize(
    root: nn.Module, modules: Sequence[nn.Module], device: torch.device, *, may_be_empty: bool = False
) -> None:
    """Makes the meta parameters and buffers of ``modules`` real, and initialises them.

    A module is initialised by its ``reset_parameters()``, as torch's own layers have it, and then by the
    ``_init_weights(module)`` of every module around it that has one, as models in the style of Hugging Face's do.
    Tied weights stay tied, with the values that their first owner gives them.

    Args:
        root: The whole model.
        modules: Parts of it; their children only where they are listed themselves.
        device: Where the memory is to be.
        may_be_empty: Whether a module with neither way to initialise it is left as it is.

    Raises:
        ValueError: A module has meta tensors and neither way to initialise them.
    """
    meta = [module for module in modules if any(tensor.is_meta for tensor in _own_tensors(module))]
    if not meta:
        return
    names = {module: name for name, module in root.named_modules()}
    initialisers = {module: list(_initialisers(root, names[module], module)) for module in meta}
    if not may_be_empty and (helpless := [module for module in meta if not initialisers[module]]):
        raise ValueError(
            f"{names[helpless[0]] or type(root).__name__!r} ({type(helpless[0]).__name__}) was made on the meta device"
            " and does not say how to initialise what it holds. Give the class a reset_parameters() method that fills"
            " its own parameters and buffers, or load a checkpoint: trainer.fit(..., ckpt_path=...)."
        )
    owners: dict[int, nn.Module] = {}
    made: dict[int, Tensor] = {}
    for module in meta:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _like(tensor, device)
                    owners[id(made[id(tensor)])] = module
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]
    for module in reversed(meta):  # a module's own values after those of its children, as when they are constructed
        tied = [tensor for tensor in _own_tensors(module) if owners.get(id(tensor), module) is not module]
        values = [tensor.detach().clone() for tensor in tied]
        for initialise in initialisers[module]:
            initialise()
        with torch.no_grad():
            for tensor, value in zip(tied, values, strict=True):
                tensor.copy_(value)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _initialisers(root: nn.Module, name: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
    for method in ("reset_parameters", "_reset_parameters"):  # the latter in nn.MultiheadAttention
        if callable(reset := getattr(module, method, None)):
            yield reset
            break
    path = name.split(".") if name else []
    for depth in range(len(path), -1, -1):
        around = root.get_submodule(".".join(path[:depth]))
        init_weights = getattr(around, "_init_weights", None)
        if callable(init_weights):

            def initialise(init_weights: Callable[[nn.Module], Any] = init_weights) -> Any:
                with torch.no_grad():
                    return init_weights(module)

            yield initialise
