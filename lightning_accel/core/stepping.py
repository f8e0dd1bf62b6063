"""Which torch optimizers can step many parameters together, and when a parameter group may be stepped this way.

Torch's optimizers have three implementations of a step: one parameter after the other; *foreach*, each operation on all
parameters of a group at once; and *fused*, the whole step of a group in one kernel. A fused kernel goes through
parameters, gradients and states by memory address. If their layouts, dtypes or sizes differ, it updates wrong elements,
without an error (on CPU, torch 2.11 to 2.13). So all of them are checked before every fused step.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

StepImpl = Literal["fused", "foreach"]
Group = dict[str, Any]

FUSED: Mapping[type[Optimizer], tuple[str, ...]] = {
    Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    SGD: ("momentum_buffer",),
    Adagrad: ("sum",),
}
"""Optimizers with a fused step → the states that its kernel goes through."""

FOREACH = (*FUSED, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop)
"""Not ASGD, whose foreach step rounds the learning rate differently: by 1e-10 of the weights in float64."""

_DISTRIBUTED: Mapping[StepImpl, tuple[type[Optimizer], ...]] = {"fused": (Adam, AdamW), "foreach": (Adam, AdamW, SGD)}
"""Optimizers that torch can step for DTensors. For others it raises a ``NotImplementedError`` (torch 2.13)."""

_ON_CPU = (torch.float32, torch.float64)
"""Dtypes for fused kernels on a CPU. Others skip elements silently (pytorch#191763, SGD of torch 2.11 to 2.13)."""

_ON_GPU = (*_ON_CPU, torch.bfloat16)
"""Dtypes on a GPU. In float16, fused kernels do not overflow where torch's other steps do: more than rounding."""

_ANY = (*_ON_GPU, torch.float16)
_PLAIN = (nn.Parameter, Tensor)

# What a subclass may override without changing how parameters are stepped.
_HARMLESS = {"add_param_group", "load_state_dict", "state_dict", "zero_grad"}


def kind_of(optimizer: Optimizer) -> type[Optimizer] | str:
    """Returns the torch class whose step an optimizer uses; or the reason why it cannot step parameters together."""
    name = type(optimizer).__name__
    kind = next((each for each in type(optimizer).__mro__ if each in FOREACH), None)
    if kind is None:
        return f"{name} is none of the optimizers of torch that can step many parameters together within rounding"
    if not step_of(kind).__module__.startswith("torch.optim"):
        return f"{kind.__name__}.step was replaced by another one than torch's"
    if step_of(type(optimizer)) is not step_of(kind):
        return f"{name} has a step of its own"
    before = type(optimizer).__mro__[: type(optimizer).__mro__.index(kind)]
    # Learning rate schedulers wrap the step of an instance and call the previous step.
    changed = {*vars(optimizer), *(each for one in before for each in vars(one))} - _HARMLESS - {"step"}
    own = sorted(each for each in changed if not each.startswith("__") and callable(getattr(kind, each, None)))
    return f"{name} has its own {', '.join(own)}" if own else kind


def step_of(kind: type[Optimizer]) -> Callable[..., Any]:
    """Returns the step of a class without torch's wrapper that calls hooks, which torch puts on subclasses too."""
    step: Any = kind.step
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) is True else step  # a mock has all
    return inner


def own_choice(group: Group) -> str | None:
    """Returns which choice of the user decides how a group is stepped; None if the user leaves it to torch."""
    for name in ("foreach", "fused"):
        if group.get(name) is not None:
            return f"{name}={group[name]} was chosen for it"
    for name in ("capturable", "differentiable"):
        if group.get(name):
            return f"{name}=True was chosen for it"
    return None


def knows_distributed(kind: type[Optimizer], group: Group, impl: StepImpl) -> bool:
    """Returns whether ``impl`` can step a group in which all parameters that are not plain tensors are DTensors."""
    return kind in _DISTRIBUTED[impl] or all(type(p) in _PLAIN for p in group["params"])


def is_one_operation(kind: type[Optimizer], group: Group) -> bool:
    """Returns whether a step is one addition for each parameter, so that nothing can be fused."""
    return kind is SGD and not group["momentum"] and not group["weight_decay"]


def is_foreach_by_itself(group: Group) -> bool:
    """Returns whether torch steps a group by foreach by default: on accelerators."""
    return all(p.device.type != "cpu" and type(p) in _PLAIN for p in group["params"])


def has_fused(kind: type[Optimizer], device_type: str, dtype: torch.dtype) -> bool:
    """Returns whether torch has a correct fused step of this optimizer for such parameters."""
    if kind not in FUSED or dtype not in {"cpu": _ON_CPU, "cuda": _ON_GPU}.get(device_type, ()):
        return False
    return kind is not Adagrad or _has_fused_adagrad(device_type)


@functools.cache
def _has_fused_adagrad(device_type: str) -> bool:
    """Returns whether Adagrad can use a fused step. On CUDA, torch 2.11 has the kernel but does not use it."""
    parameter = nn.Parameter(torch.zeros(1, device=device_type))
    parameter.grad = torch.zeros_like(parameter)
    try:
        with torch.no_grad():
            inspect.unwrap(Adagrad.step)(Adagrad([parameter], fused=True))  # calls no hooks
    except (RuntimeError, TypeError):
        return False
    return True


def why_never(kind: type[Optimizer], group: Group, impl: StepImpl) -> str | None:
    """Returns why a group's settings forbid this implementation; None if they allow it."""
    for name, value in group.items():
        if isinstance(value, Tensor) or (name == "betas" and any(isinstance(each, Tensor) for each in value)):
            return f"its {name} is a tensor"
    if impl == "foreach" and kind is SGD and group["nesterov"]:
        return "torch's foreach step with nesterov changes .grad, too"
    # By ids: to hash a tensor is a call in Python, at every step.
    if len(set(map(id, group["params"]))) < len(group["params"]):
        return "it has a parameter twice, whose two steps would be counted before either is taken"
    return own_choice(group)


def make_ready(
    kind: type[Optimizer], group: Group, states: Mapping[Tensor, dict[str, Any]], impl: StepImpl
) -> str | None:
    """Prepares a group for a step by this implementation. Returns None, or why the group must not be stepped so.

    Call it before every step whose :func:`form_of` differs from that of the step before: 1 to 2 µs for each parameter.

    A fused kernel reads the step counts in ``states`` in float32 and on the parameter's device. They are moved there.
    """
    reason = why_never(kind, group, impl)
    strange = [p for p in group["params"] if type(p) not in _PLAIN and p.grad is not None]
    if reason is None and strange:
        reason = _why_not_distributed(strange, kind, group, impl)
    if reason is not None:
        return reason
    # One loop with as few calls as possible: it runs before every step.
    is_fused = impl == "fused"
    names, on_cpu, on_gpu = (FUSED[kind], _ON_CPU, _ON_GPU) if is_fused else ((), _ANY, _ANY)
    stepping = without_state = 0
    strays = []
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        stepping += 1
        if gradient.layout is not torch.strided:
            return "a gradient is sparse"
        dtype, is_cpu = parameter.dtype, parameter.is_cpu
        if dtype not in (on_cpu if is_cpu else on_gpu) or gradient.dtype is not dtype:
            return f"a parameter is of {dtype} on {parameter.device.type}, its gradient of {gradient.dtype}"
        if not (is_cpu or parameter.is_cuda):
            return f"a parameter is on {parameter.device.type}"
        if not is_fused:
            continue
        state = states.get(parameter) or _NO_STATE
        others = [gradient]
        for name in names:
            value = state.get(name)
            if value is not None:
                others.append(value)
        without_state += len(others) == 1
        if strange:
            parameter, *others = (tensor.to_local() for tensor in (parameter, *others))
        if parameter.is_contiguous():
            numel = parameter.numel()
            for other in others:
                if not other.is_contiguous() or other.numel() != numel or other.dtype is not dtype:
                    return _LAYOUT
        elif not _lie_alike(parameter, others):
            return _LAYOUT
        step = state.get("step")
        if step is not None:
            is_beside = step.is_cpu if is_cpu else step.device == parameter.device
            if step.dtype is not torch.float32 or not is_beside:
                strays.append((state, step, parameter.device))
    if kind is SGD and group["momentum"] and 0 < without_state < stepping:
        return "some of its parameters have no momentum yet"  # torch 2.11 to 2.13 raise
    for state, step, device in strays:
        state["step"] = step.to(device, torch.float32)
    return None


_shape, _dtype, _device = (getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device"))


def form_of(optimizer: Any) -> Any:
    """Returns what decides on the answers of :func:`make_ready`, but for :func:`why_never`, in few calls.

    If it equals that of an earlier step, so do the answers. None means that nobody can tell. Of states, it reads which
    they are: memory of each tensor that is touched has to be fetched by the processor.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    stepping = [gradient for gradient in gradients if gradient is not None]
    trained = [*parameters, *stepping]
    if not set(map(type, trained)).issubset(_PLAIN):
        return None
    try:
        forms = [list(map(read, trained)) for read in (Tensor.stride, _shape, _dtype, _device)]
    except RuntimeError:  # what is sparse has no strides
        return None
    groups = [(len(group["params"]), bool(group.get("momentum"))) for group in optimizer.param_groups]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return groups, list(map(id, parameters)), list(map(type, gradients)), list(map(id, states)), forms


def _why_not_distributed(strange: Sequence[Any], kind: type[Optimizer], group: Group, impl: StepImpl) -> str | None:
    """Returns why tensors of special types cannot be stepped; None if all are DTensors of one mesh, gradients alike."""
    # Not imported here, which is slow: it is loaded if there are any.
    distributed = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    for parameter in strange:
        if type(parameter) is not distributed:
            return f"a parameter is a {type(parameter).__name__}"
        if type(parameter.grad) is not distributed or parameter.grad.placements != parameter.placements:
            return "a gradient is distributed otherwise than its parameter"
    if kind not in _DISTRIBUTED[impl]:
        return f"torch has no {impl} step of {kind.__name__} for distributed parameters"
    stepping = sum(parameter.grad is not None for parameter in group["params"])
    if len(strange) < stepping or any(parameter.device_mesh != strange[0].device_mesh for parameter in strange):
        return "not all of its parameters are distributed over the same processes"
    return None


_NO_STATE: dict[str, Any] = {}
_LAYOUT = "a parameter, its gradient and its state do not lie alike in memory"


def _lie_alike(parameter: Tensor, others: Sequence[Tensor]) -> bool:
    """Returns whether all have the same elements at the same offsets, without gaps."""
    stride, numel, dtype = parameter.stride(), parameter.numel(), parameter.dtype
    return _is_dense(parameter.shape, stride) and all(
        other.stride() == stride and other.numel() == numel and other.dtype is dtype for other in others
    )


@functools.lru_cache(maxsize=4096)
def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Returns whether every address between the first and the last element belongs to exactly one element."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


# -- how many steps a parameter has seen: state["step"] ---------------------------------------------------------------


def own_steps(group: Group, states: Mapping[Tensor, dict[str, Any]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the parameters whose step count is not where torch keeps it without fused kernels, with a count that is.

    That is on the host, in float32, or in float64 if that is the default dtype.
    """
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    by_device: defaultdict[torch.device, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for parameter in group["params"]:
        step = states.get(parameter, {}).get("step")
        if isinstance(step, Tensor) and (step.dtype is not dtype or not step.is_cpu):
            by_device[step.device].append((parameter, step))
    for found in by_device.values():
        # One copy for all: each copy waits for the device.
        values = torch.stack([step for _, step in found]).to("cpu", dtype)
        yield from ((parameter, value.clone()) for (parameter, _), value in zip(found, values, strict=True))
