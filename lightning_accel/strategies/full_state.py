"""Whole state dicts of sharded modules and optimizers, as a plain Trainer writes and reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_accel.core.tree import leaves, map_leaves


def gathered(data: Any, *, keep: bool) -> Any:
    """``data`` with every sharded tensor in it put together, on the CPU. A collective call.

    Args:
        data: Any structure, the same on every rank.
        keep: Whether this rank wants it; False: it only takes part, with None in each tensor's place.
    """
    if not any(isinstance(leaf, DTensor) for leaf in leaves(data)):
        return data
    return map_leaves(lambda tensor: _whole(tensor, keep), data, DTensor)


def full_model_state(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The module's ``state_dict()``, put together on the CPU; tied weights share their memory. A collective call.

    Args:
        module: Sharded.
        keep: Whether this rank wants it; False: it only takes part, and gets an empty dict.
    """
    state: dict[str, Any] = module.state_dict()
    parameters = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    wholes: dict[int, Any] = {}
    for name, value in state.items():
        identity = parameters.get(name, id(value))
        if identity not in wholes:
            wholes[identity] = gathered(value, keep=keep)
        state[name] = wholes[identity]
    return state if keep else {}


def load_full_model_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Loads a whole ``state_dict()`` into a sharded module; each rank takes its shards out of it.

    Args:
        module: Sharded.
        state: The same on every rank, on any device.
        strict: Whether the two must have the same names.

    Raises:
        RuntimeError: Names or shapes are not those of ``module``; it says which.
    """
    own = module.state_dict()
    _check_same_model(own, state, strict=strict)
    with torch.no_grad():
        module.load_state_dict(
            {name: _as_sharded(value, own[name]) if name in own else value for name, value in state.items()},
            strict=strict,
        )


def load_full_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a whole ``state_dict()`` into an optimizer over sharded parameters.

    Args:
        optimizer: Its groups hold as many parameters, in the same order, as those of the one that was saved.
        state: The same on every rank, on any device.
    """
    places = [place for group in state["param_groups"] for place in group["params"]]
    parameters = dict(zip(places, (p for group in optimizer.param_groups for p in group["params"]), strict=False))
    shards = {
        place: {key: _as_sharded(value, parameters.get(place)) for key, value in values.items()}
        for place, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": shards})


def _whole(tensor: DTensor, keep: bool) -> Tensor | None:
    whole = tensor.full_tensor()
    return whole.detach().cpu() if keep else None


def _as_sharded(value: Any, like: Any) -> Any:
    """``value`` sharded as ``like`` is, where both have the same shape; else ``value``."""
    if not (isinstance(value, Tensor) and isinstance(like, DTensor) and value.shape == like.shape):
        return value
    if isinstance(value, DTensor):
        return value
    mesh = like.device_mesh
    # Every rank has the whole of it: nothing has to be sent.
    return distribute_tensor(value.to(like.device), mesh, like.placements, src_data_rank=None)


def _check_same_model(own: Mapping[str, Any], state: Mapping[str, Any], *, strict: bool) -> None:
    complaints: list[str] = []
    if strict and (missing := [key for key in own if key not in state]):
        complaints.append(f"it lacks {_some(missing)}")
    if strict and (unexpected := [key for key in state if key not in own]):
        complaints.append(f"the model has no {_some(unexpected)}")
    shapes = [
        f"{key} {tuple(state[key].shape)} for {tuple(own[key].shape)}"
        for key in own
        if isinstance(own[key], Tensor) and isinstance(state.get(key), Tensor) and own[key].shape != state[key].shape
    ]
    if shapes:
        complaints.append(f"shapes differ: {_some(shapes)}")
    if complaints:
        raise RuntimeError(
            f"The checkpoint is of another model: {'; '.join(complaints)}. Load it into the model that saved it, or set"
            " strict_loading = False on the module for names that may differ."
        )


def _some(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
