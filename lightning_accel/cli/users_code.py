"""Finds and calls the user's functions and classes by name, and reports their failing line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint, file or name that a command cannot use. The message says what is accepted."""


@contextmanager
def running(what: str, more: str = "") -> Iterator[None]:
    """Runs the user's code, which can import from the working folder. ``more`` says what to do if it fails.

    Raises:
        CheckpointError: The code raised an error, or tried to end the process.
    """
    sys.path.insert(0, "")
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, SystemExit) as error:
        raise CheckpointError(f"{what}: {said_of(error)}. {more}".rstrip()) from error
    finally:
        sys.path.remove("")


def said_of(error: BaseException) -> str:
    """Describes an error in part of a line, with the user's line of code."""
    from lightning_accel.deploy.errors import users_line_of

    line = users_line_of(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())[:400].rstrip(".: ")
    return text + (f" at {line}" if line else "")


def named(name: str, option: str) -> Any:
    """Returns the object that ``MODULE:NAME`` names, in an installed module or one in the working folder.

    Raises:
        CheckpointError: The object does not exist, or the module cannot be imported.
    """
    module, _, attribute = name.partition(":")
    given = f"{option} {name}"
    if not attribute or not all(part.isidentifier() for part in module.split(".")):
        raise CheckpointError(
            f"{given}: write package.module:Name, such as train:Digits for a class in train.py in the working folder."
        )
    guard = "What a module does by itself when it is imported belongs under `if __name__ == '__main__':`"
    with running(given, f"Importing {module} runs it. {guard}."):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            places = f"Modules are sought in the working folder, {Path.cwd()}, and among those that are installed."
            raise CheckpointError(f"{given}: {said_of(error)}. {places}") from error
    if not hasattr(found, attribute):
        raise CheckpointError(f"{given}: {found.__file__ or module} has no {attribute}.")
    return getattr(found, attribute)


def called(name: str, option: str) -> Any:
    """Returns the result of a function of the user.

    Raises:
        CheckpointError: The function is not found, needs arguments, or raises an error.
    """
    function = named(name, option)
    with running(f"{option} {name}", "It is called without arguments."):
        return function()


def batches_of(name: str, option: str, *, at_most: int) -> list[Any]:
    """Returns the first batches from the result of a function of the user.

    Raises:
        CheckpointError: There are none.
    """
    takes = "a function that returns a few batches such as the model will be served, a DataLoader or a list"
    loader = called(name, option)
    with running(f"{option} {name}", f"It takes {takes}."):
        found = list(islice(loader, at_most))
    if not found:
        raise CheckpointError(f"{option} {name} gave no batches: it takes {takes}.")
    return found
