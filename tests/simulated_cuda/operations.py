"""What is known of an operation of torch's from its schema, and how the processor does it in the device's stead."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from simulated_cuda import native

MIXING = {
    "aten::copy_", "aten::_foreach_copy_", "aten::set_",
    "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index_put", "aten::_fused_adam_", "aten::_fused_adamw_",
}  # fmt: skip
"""Operations that take tensors of the host besides those of a device: others take single numbers only."""

INDEXING = {name for name in MIXING if "index" in name}

WAITING = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::equal",
    "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::unique_consecutive",
    "aten::repeat_interleave", "aten::bincount", "aten::_linalg_check_errors",
}  # fmt: skip
"""Operations whose result's size, or the result itself, the host has to be told."""

PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot"}
"""Operations that a device has for fractions only."""

GENERATORS = [torch.Generator() for _ in range(native.MOST_DEVICES)]
"""Of random numbers: each device has its own."""


@dataclass(frozen=True)
class Operation:
    """One overload.

    Attributes:
        is_view: Whether it only gives other names to memory, which no kernel does.
        is_random: Whether it draws random numbers.
        generator: Whether it takes a generator for them.
        written: Positions and names of the arguments that it writes to.
        aliases: For each result, the argument that it is (True) or is a view of (False), if any.
        returns_list: Whether its one result is a list of tensors.
        changes_layout: Whether it gives its first argument other sizes or strides.
    """

    name: str
    is_view: bool
    is_random: bool
    generator: bool
    written: tuple[tuple[int, str], ...]
    aliases: tuple[tuple[int, str, bool] | None, ...]
    returns_list: bool
    changes_layout: bool


@functools.cache
def operation(func: Any) -> Operation:
    """What the schema of an overload says."""
    schema = func._schema
    arguments = list(enumerate(schema.arguments))
    aliases = [_alias(result, schema.arguments) for result in schema.returns]
    return Operation(
        name=schema.name,
        is_view=func.is_view,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        generator=any(argument.name == "generator" for _, argument in arguments),
        written=tuple((k, a.name) for k, a in arguments if a.alias_info is not None and a.alias_info.is_write),
        aliases=tuple(aliases),
        returns_list=len(schema.returns) == 1 and _is_list(schema.returns[0]),
        changes_layout=torch.Tag.inplace_view in func.tags or schema.name in ("aten::resize_", "aten::set_"),
    )


def _alias(result: Any, arguments: Any) -> tuple[int, str, bool] | None:
    info = result.alias_info
    for position, argument in enumerate(arguments):
        given = argument.alias_info
        if info is not None and given is not None and (_is_list(result) or info.before_set & given.before_set):
            return position, argument.name, info.is_write
    return None


def _is_list(value: Any) -> bool:
    return bool(value.type.kind() == "ListType")


def compute(func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
    """Does an operation on the processor, with a device's rules where the two differ."""
    known = operation(func)
    if known.name in ("aten::_softmax", "aten::_log_softmax") and args[2]:  # from half to single in one kernel
        return func(args[0].float(), args[1], False)
    if known.name in ("aten::_softmax_backward_data", "aten::_log_softmax_backward_data") and args[3] != args[0].dtype:
        return func(args[0], args[1], args[2], args[0].dtype).to(args[3])
    if known.name in PRODUCTS and func._overloadname == "dtype":  # of half-precision factors, summed up in another
        (dtype,) = [given for given in args if isinstance(given, torch.dtype)]
        operands = [one.to(dtype) if isinstance(one, torch.Tensor) else one for one in args if one is not dtype]
        return func.overloadpacket.default(*operands, **kwargs)
    if not known.is_random:
        return func(*args, **kwargs)
    generator = GENERATORS[device]
    if known.generator:
        if not any(isinstance(given, torch.Generator) for given in (*args, *kwargs.values())):
            kwargs = {**kwargs, "generator": generator}
        return func(*args, **kwargs)
    of_host = torch.default_generator
    before = of_host.get_state()
    of_host.set_state(generator.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(of_host.get_state())
        of_host.set_state(before)
