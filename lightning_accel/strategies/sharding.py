"""Shards a module over processes with FSDP2: each repeated block separately, then the rest."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_accel.core.blocks import called_children, find_blocks
from lightning_accel.core.device import CONVOLUTIONS
from lightning_accel.core.torch_private.autograd import has_gradient_hooks
from lightning_accel.strategies.materialize import materialize, own_tensors

_LOW_ON_CPU = (nn.Linear, *CONVOLUTIONS, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The way in which a module was sharded."""

    units: tuple[str, ...]  # the blocks that are gathered one at a time
    roots: tuple[str, ...]  # the modules that hold the rest: the module itself, or its parts
    left: Mapping[str, str]  # block → the reason why it is not a unit
    dtype: torch.dtype | None  # the dtype of gathered parameters; their own if None


shardings: weakref.WeakKeyDictionary[nn.Module, Sharding] = weakref.WeakKeyDictionary()
"""The modules that :func:`shard` has sharded, in this run or an earlier one."""


def shard(
    module: nn.Module,
    mesh: DeviceMesh,  # one-dimensional: the processes to shard over
    device: torch.device,  # this process's own
    *,
    dtype: torch.dtype | None = None,
    blocks: Sequence[str] = (),  # class names or module paths of the units; empty: the repeated blocks
    apart: bool = False,
    may_be_empty: bool = False,  # whether a checkpoint is loaded later into tensors that nothing initialises
) -> Sharding:
    """Shards parameters in place, from rank 0's values. Gradients and optimizer states made from them are shards too.

    Each unit is moved to the device (or allocated there if it is on the meta device), gets rank 0's weights and is
    sharded before the next one: a device never holds more than its shards and one unit. Scalar parameters stay whole:
    see :mod:`lightning_accel.strategies.scalars`.

    Parameters are gathered in ``dtype``, except in units with layers that need float32 parameters under autocast.
    Gradients are then reduced in float32, and stored and stepped in the parameters' own dtype, which is used for all if
    no ``dtype`` is given.

    With ``apart``, each part of the module is a root of its own, so that one step may have several backward passes. The
    module's own forward then gathers nothing.

    Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023),
    https://arxiv.org/abs/2304.11277.

    Raises:
        ValueError: There is nothing to shard, or something that cannot be sharded.
    """
    _check(module, apart=apart)
    found, left = _separable(module, find_blocks(module, blocks))
    roots = dict(_parts(module)) if apart else {"": module}
    units = {site: unit for site, unit in found.items() if site not in roots}
    managed: set[nn.Module] = set()
    for unit in dict.fromkeys((*units.values(), *roots.values(), module)):
        own = [part for part in unit.modules() if part not in managed]
        managed.update(own)
        materialize(module, own, device, may_be_empty=may_be_empty)
        _take_from_rank_0(own, device, mesh)
        if apart and unit is module:  # only its own buffers are left
            break
        # A root stays gathered between its forward and backward pass, unless a step has several backward passes.
        reshard = True if apart or unit not in roots.values() else None
        _check_dtypes(module, own)
        policy = _policy(own, dtype, device)
        # Collected again, since materialised parameters are new objects.
        scalars = {parameter for parameter in unit.parameters() if parameter.dim() == 0}
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=scalars)
    sharding = shardings[module] = Sharding(units=tuple(units), roots=tuple(roots), left=left, dtype=dtype)
    return sharding


def is_sharded(module: nn.Module) -> bool:
    """Returns whether any parameter of a module is spread over processes."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _check(module: nn.Module, *, apart: bool) -> None:
    """Raises a ``ValueError`` for parameters that cannot be sharded, or only with a loss that stays unnoticed."""
    parameters = dict(module.named_parameters())
    kind = type(module).__name__
    if not parameters:
        raise ValueError(
            f"{kind} has no parameters, so there is nothing to shard. Make its layers in __init__ or in"
            " configure_model, or use strategy='accel'."
        )
    complaints = {
        "has no shape before its first batch (a lazy module), and cannot be sharded. Call the module once in"
        " configure_model or before fit, or give its sizes.": (n for n, p in parameters.items() if is_lazy(p)),
        "has a hook on its gradient, which would be lost: sharding makes another parameter of it. Register the hook in"
        " on_fit_start, when the module is sharded, or use strategy='accel_ddp'.": (
            name for name, parameter in parameters.items() if has_gradient_hooks(parameter)
        ),
        "is to get a sparse gradient (sparse=True), which FSDP does not reduce. Set sparse=False, or use"
        " strategy='accel_ddp'.": (n for n, m in module.named_modules() if getattr(m, "sparse", False) is True),
        f"is a parameter of {kind} itself. With manual optimization its parts are gathered one by one: move the"
        " parameter into one of them, or use strategy='accel_ddp'.": (
            name for name, parameter in module.named_parameters(recurse=False) if apart and parameter.dim() > 0
        ),
    }
    for complaint, names in complaints.items():
        for name in names:
            raise ValueError(f"{name!r} {complaint}")
    homes: dict[nn.Parameter, str] = {}
    for site, part in _parts(module) if apart else ():
        for name, parameter in part.named_parameters():
            if (other := homes.setdefault(parameter, site)) != site:
                raise ValueError(
                    f"'{site}.{name}' is shared with {other!r}. With manual optimization the parts of {kind} are"
                    " gathered one by one: put the two into one module, or use strategy='accel_ddp'."
                )


def _check_dtypes(module: nn.Module, parts: Sequence[nn.Module]) -> None:
    trained = [p for part in parts for p in part.parameters(recurse=False) if p.requires_grad and p.dim() > 0]
    other = next((p for p in trained if p.dtype != trained[0].dtype), None)
    if other is not None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        raise ValueError(
            f"{names[trained[0]]!r} is {trained[0].dtype} and {names[other]!r} is {other.dtype}: FSDP reduces the"
            " gradients of a block together, in one dtype. Convert the module to one (module.float()), freeze one of"
            " the two, or use strategy='accel_ddp'."
        )


def _separable(module: nn.Module, blocks: dict[str, nn.Module]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Returns the blocks that share no parameters with others, and the other blocks with reasons."""
    owners: dict[nn.Parameter, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        home = next((site for site in blocks if name.startswith(f"{site}.")), "")
        owners.setdefault(parameter, set()).add(home)
    found, left = {}, {}
    for site, block in blocks.items():
        others = {o for p in block.parameters() for o in owners[p]} - {site}
        if others:
            left[site] = f"shares parameters with {min(others) or 'the rest of the model'}"
        elif not any(True for _ in block.parameters()):
            left[site] = "has no parameters"
        else:
            found[site] = block
    return found, left


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the outermost modules that have parameters and are called themselves."""
    return [(name, child) for name, child in called_children(module) if any(True for _ in child.parameters())]


def _take_from_rank_0(modules: Sequence[nn.Module], device: torch.device, mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    source = torch.distributed.get_global_rank(group, 0)
    for tensor in dict.fromkeys(tensor for module in modules for _, tensor in own_tensors(module)):
        if isinstance(tensor, DTensor):
            continue
        moved = tensor.detach().to(device).contiguous()
        # Sent as bytes: gloo supports neither complex numbers nor every small float.
        torch.distributed.broadcast(moved.view(-1).view(torch.uint8), source, group=group)
        tensor.data = moved


def _policy(modules: Sequence[nn.Module], dtype: torch.dtype | None, device: torch.device) -> MixedPrecisionPolicy:
    # Autocast stays on and casts the inputs, since model code relies on the operations that it keeps in float32.
    if dtype is None or not all(_takes_low_weights(module, device) for module in modules):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _takes_low_weights(module: nn.Module, device: torch.device) -> bool:
    """Returns whether ``module`` computes under autocast with low-precision weights of its own and any input."""
    if not any(True for _ in module.parameters(recurse=False)):
        return True
    if device.type == "cpu":
        # Autocast on a CPU casts for products and convolutions only; norms reject other weight dtypes (torch 2.13).
        return isinstance(module, _LOW_ON_CPU)
    # The kernels of norms with running statistics need weights in the dtype of these statistics.
    return not hasattr(module, "track_running_stats")
