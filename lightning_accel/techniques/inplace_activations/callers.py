"""What a caller's bytecode says of one call: what is called, with what, and what becomes of the result at once."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

from lightning_accel.core.call_sites import at_call, variables

_CALLS = frozenset({"CALL", "CALL_METHOD", "CALL_FUNCTION"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# With one of them in an argument, what stands before a call is not what made its argument, or not all of it.
_SHUFFLES = ("COPY", "SWAP", "DUP", "ROT", "JUMP", "POP_JUMP", "FOR_ITER", "SEND", "YIELD", "UNPACK")


@dataclass(frozen=True, slots=True)
class ActivationCall:
    """A call of one thing with one positional argument."""

    callee: str  # the attribute that is called, "relu" of self.relu(x); empty: something else
    argument: str | None  # the local variable that is the argument; None: a temporary result
    is_spent: bool  # that variable is bound anew, deleted or returned from before anything else is run
    is_own: bool  # what that variable holds is for certain the result of a call or an operation in this function
    reader: str | None  # the attribute of self that is called next, with the result, of which nothing else stays


def read_call(code: CodeType, offset: int) -> ActivationCall | None:
    """Reads the call at ``offset`` of ``code``; None where it is of another form than can be told for certain."""
    found, at = at_call(code, offset)
    if at < 0 or found[at].offset != offset or (callee := _callee(found, at)) is None:
        return None
    last = found[at - 1]
    argument = _loaded(last)
    if argument is not None and variables(last) != (argument,):
        return None  # two variables by one instruction
    return ActivationCall(
        callee=_name(code, found, callee),
        argument=argument,
        is_spent=argument is not None and _is_spent(found, at, argument),
        is_own=argument is not None and _is_own(code, found, at, argument),
        reader=_reader(code, found, at, callee),
    )


def _callee(found: Sequence[dis.Instruction], at: int) -> int | None:
    """Where what the call at ``at`` calls is loaded: before the instructions that make its one argument."""
    call = found[at]
    is_plain = call.opname in _CALLS and call.arg == 1 and not call.is_jump_target
    if not is_plain or found[at - 1].opname == "KW_NAMES":
        return None
    missing = 1
    for n in range(at - 1, 0, -1):
        if found[n].is_jump_target or found[n].opname.startswith(_SHUFFLES):
            return None
        missing -= _effect(found[n])
        if missing == 0:
            callee = n - 2 if found[n - 1].opname == "PUSH_NULL" else n - 1  # from Python 3.13 on
            return callee if callee >= 0 and not found[n - 1].is_jump_target else None
        if missing < 0:
            return None
    return None


def _is_spent(found: Sequence[dis.Instruction], at: int, variable: str) -> bool:
    """Whether nothing can read ``variable`` any more once the call at ``at`` is over."""
    for instruction in found[at + 1 :]:
        if instruction.is_jump_target:
            return False
        if variable == _stored(instruction) or instruction.opname == "RETURN_VALUE":
            return True
        if instruction.opname == "DELETE_FAST" and instruction.argval == variable:
            return True
        if instruction.opname not in ("STORE_FAST", "DELETE_FAST", "LOAD_CONST"):
            return False
    return False


def _is_own(code: CodeType, found: Sequence[dis.Instruction], at: int, variable: str) -> bool:
    """Whether ``variable`` holds a result: by the lines straight before ``at``, or by all there are."""
    stores = [n for n, i in enumerate(found) if i.opname.startswith("STORE_FAST") and variable in variables(i)]
    straight = next(n for n in range(at, -1, -1) if found[n].is_jump_target or n == 0)
    if latest := [n for n in stores if straight < n < at]:
        return _is_result(found, latest[-1], variable)
    parameters = inspect.getargs(code)
    is_parameter = variable in (*parameters.args, parameters.varargs, parameters.varkw)
    return not is_parameter and all(_is_result(found, n, variable) for n in stores)


def _is_result(found: Sequence[dis.Instruction], at: int, variable: str) -> bool:
    """Whether what is stored at ``at`` was returned by the instruction before."""
    return _stored(found[at]) == variable and found[at - 1].opname.startswith(("CALL", "BINARY_OP"))


def _effect(instruction: dis.Instruction) -> int:
    """By how much the stack grows."""
    effect = dis.stack_effect(instruction.opcode, instruction.arg)
    if instruction.opname == "CALL" and "PRECALL" in dis.opmap:  # Python 3.11: two instructions share the work
        effect += dis.stack_effect(dis.opmap["PRECALL"], instruction.arg)
    return effect


def _name(code: CodeType, found: Sequence[dis.Instruction], callee: int) -> str:
    """The attribute that is loaded at ``callee``, if need be through a variable that never holds anything else."""
    variable = _loaded(found[callee])
    if found[callee].opname in _ATTRIBUTES:
        return str(found[callee].argval)
    if variable is None or variable in inspect.getargs(code).args:
        return ""
    origins = {
        found[n - 1].argval if found[n - 1].opname in _ATTRIBUTES and not i.is_jump_target else ""
        for n, i in enumerate(found)
        if "STORE_FAST" in i.opname and variable in variables(i)
    }
    return str(origins.pop()) if len(origins) == 1 else ""


def _reader(code: CodeType, found: Sequence[dis.Instruction], at: int, callee: int) -> str | None:
    """Of ``self.b(self.act(…))``, ``x = self.act(…)`` and then ``x = self.b(x)`` or ``return self.b(x)``: ``"b"``."""
    variable = _stored(found[at + 1])
    if variable is None:
        reader = _callee(found, at + 1)
    else:
        call = next((n for n in range(at + 2, len(found) - 1) if found[n].opname in _CALLS), len(found) - 1)
        reader = _callee(found, call)
        is_next = call == at + 4 + (found[at + 1].opname == "STORE_FAST") and _loaded(found[call - 1]) == variable
        if not is_next or not _is_spent(found, call, variable):
            return None
    if reader is None:
        return None
    owners = {_loaded(found[n - 1]) for n in (callee, reader) if found[n].opname in _ATTRIBUTES}
    is_self = owners == {code.co_varnames[0]} and not any(_stored(i) in owners for i in found)
    return str(found[reader].argval) if is_self and found[reader].opname in _ATTRIBUTES else None


def _loaded(instruction: dis.Instruction) -> str | None:
    """The variable whose value an instruction leaves on top of the stack."""
    return str(variables(instruction)[-1]) if "LOAD_FAST" in instruction.opname else None


def _stored(instruction: dis.Instruction) -> str | None:
    """The variable that an instruction stores the top of the stack in."""
    is_store = instruction.opname.startswith("STORE_FAST") and not instruction.is_jump_target
    return str(variables(instruction)[0]) if is_store else None
