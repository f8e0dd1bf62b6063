"""Whether the user's code reads the attention weights that it asked for by default.

``out, _ = self.attn(x, x, x)`` and ``self.attn(x, x, x)[0]`` make ``nn.MultiheadAttention`` compute a (B, H, T, S)
tensor that nobody looks at. The bytecode that follows the call says so, and never says so wrongly: what is not one of
the shapes known here counts as reading them.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType

import torch
from torch import nn

from lightning_accel.core.call_sites import at_call, remembered, variables
from lightning_accel.core.torch_private.modules import eager_call

_OWN_PACKAGE = __name__.partition(".")[0]

# What lies between a user's call of a module and the module's forward pass. With hooks, torch goes through a function
# inside `_call_impl`, which is not named here on purpose: hooks see the weights.
_PASSED_ON = (eager_call(nn.Module).__code__, nn.Module.__call__.__code__)

# Names in code that may read a local variable without loading it.
_READS_ALL_LOCALS = {"locals", "vars", "eval", "exec", "breakpoint", "set_trace", "_getframe", "currentframe"}


def caller_discards_weights() -> bool:
    """Whether the user's code that called this module certainly never reads the second item of what it returns.

    To be called in a module's forward pass, or in this package's functions that stand in for one. Walks up to the
    frame that called the module: frames of this package and of ``Module.__call__`` are passed over, anything else
    (hooks, gradient checkpointing, a container) is taken for the caller and judged by its own code: it has to unpack
    the result into two variables and never load the second, or index it with ``[0]``. False where it is compiled.
    """
    if torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame and (frame.f_code in _PASSED_ON or frame.f_globals.get("__name__", "").split(".")[0] == _OWN_PACKAGE):
        frame = frame.f_back
    return frame is not None and _discards(frame)


def discards_second_item(code: CodeType, offset: int) -> bool:
    """Whether ``code``, in a call at byte ``offset``, certainly never reads the second item of the call's result."""
    found, at = at_call(code, offset)
    if at < 0 or not found[at].opname.startswith("CALL") or at + 2 >= len(found):
        return False
    first, second = found[at + 1 : at + 3]
    if first.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):  # [0]
        is_index = second.opname == "BINARY_SUBSCR" or (second.opname == "BINARY_OP" and second.argrepr == "[]")
        return is_index and type(first.argval) is int and first.argval == 0
    if first.opname != "UNPACK_SEQUENCE" or first.arg != 2:
        return False
    name = _second_target(found[at + 2 : at + 4])
    is_hidden = name is None or name in code.co_cellvars or not _READS_ALL_LOCALS.isdisjoint(code.co_names)
    return not is_hidden and not any(name in _loaded(instruction) for instruction in found)


_discards = remembered(discards_second_item)


def _second_target(stores: list[dis.Instruction]) -> str | None:
    """The local variable that takes the second item, if it is one."""
    if stores[0].opname == "STORE_FAST_STORE_FAST":
        return variables(stores[0])[1]
    is_plain = stores[0].opname in ("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL", "POP_TOP")
    if is_plain and len(stores) == 2 and stores[1].opname in ("STORE_FAST", "STORE_FAST_LOAD_FAST"):
        return variables(stores[1])[0]
    return None


def _loaded(instruction: dis.Instruction) -> tuple[str, ...]:
    """The local variables that it reads."""
    if instruction.opname == "STORE_FAST_LOAD_FAST":
        return variables(instruction)[1:]
    return variables(instruction) if instruction.opname.startswith("LOAD_FAST") else ()
