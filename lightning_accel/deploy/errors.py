"""Errors of exports, with the line of the user's code that caused them."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

from lightning_accel.core.user_frames import is_users

_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_NODE = re.compile(r"Error when translating node %(\w+)")


class ExportError(RuntimeError):
    """A model was not exported. Nothing was written."""


class QuantizeError(RuntimeError):
    """A lower precision changes a model's outputs by more than is allowed. Nothing was converted."""


class DynamicDimensionError(ExportError):
    """A dimension that was requested as dynamic is fixed by the model."""


class MissingPackageError(ImportError):
    """An optional package is not installed. The message says how to install it."""


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield now
        now = now.__cause__ or now.__context__


def users_line_of(error: BaseException) -> str:
    """Returns the user's innermost line that led to an error, ``model.py:12, in forward``; empty if unknown.

    Exporters run the model's code, so the traceback leads through it, or they print where an operation came from.
    """
    texts = ("".join(traceback.format_tb(one.__traceback__)) + str(one) for one in chain_of(error))
    return next(filter(None, map(users_line_in, texts)), "")


def users_line_in(stack_trace: str) -> str:
    """Returns the user's innermost line in a stack trace, as a traceback or as a graph has stored it for a node."""
    lines = [line for line in _LINE.findall(stack_trace) if is_users(line[0])]
    return "{}:{}, in {}".format(*lines[-1]) if lines else ""


def failing_node(error: BaseException) -> str:
    """Returns the graph node on which an exporter says that it failed; empty if it names none."""
    found = (_NODE.search(str(one)) for one in chain_of(error))
    return next((match.group(1) for match in found if match), "")


def in_words(error: BaseException) -> str:
    """Describes the innermost cause in one line."""
    if isinstance(error, ExportError):
        return str(error)
    cause = [*chain_of(error)][-1] if failing_node(error) else error
    lines = [line.strip(" -") for line in str(cause).strip().splitlines() if line.strip(" -")]
    said = "".join(lines[:1])
    if len(lines) > 1 and said.startswith("Constraints violated"):  # the second line says which constraints
        said = lines[1]
    if len(lines) > 1 and said.startswith("Check '"):  # OpenVINO puts a line of its own source first
        said = " ".join(lines[1:])
    if "data-dependent" in said:
        said = f"its control flow depends on data ({said}): torch.where, torch.cond, or a mask instead"
    return f"{type(cause).__name__}: {said[:400]}".rstrip(".:")
