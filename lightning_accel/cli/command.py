"""Commands: functions with their parameters as options and their docstrings as help, and how they end."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args, get_origin

if TYPE_CHECKING:
    from rich.console import Console

FAILED, INTERRUPTED, TERMINATED = 2, 130, 143
"""Exit statuses. The latter two are 128 plus the signal's number, as in shells."""


@dataclass(frozen=True)
class Command:
    """A subcommand of ``lightning-accel``."""

    function: Callable[..., int]  # returns the exit status; :func:`add_options` describes its parameters
    help: str  # in the list of subcommands
    epilog: str | None = None
    runs_users_code: bool = False  # as :func:`ended` takes it

    def add_to(self, subcommands: Any, name: str) -> None:
        """Adds it to the subcommands of an ``argparse`` parser."""
        parser: argparse.ArgumentParser = subcommands.add_parser(name, help=self.help, epilog=self.epilog)
        add_options(parser, self.function)

    def run(self, options: argparse.Namespace) -> int:
        """Runs it with parsed options. Returns the exit status."""
        given = {name: value for name, value in vars(options).items() if name != "subcommand"}
        return ended(options.subcommand, lambda: self.function(**given), runs_users_code=self.runs_users_code)


def add_options(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Adds a function's parameters to a parser, and its docstring as description and help.

    Keyword-only parameters are options; ``bool`` makes a flag, ``list[...]`` an option that may be repeated, and
    ``Literal`` one with choices. The metadata of ``Annotated`` is a dictionary of further arguments of
    ``add_argument``.
    """
    about, _, text = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:\n")
    parser.description = " ".join(about.split())
    helps = {name: " ".join(said.split()) for name, said in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.M)}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        kind, more = parameter.annotation, dict[str, Any]()
        if get_origin(kind) is Annotated:
            kind, more = get_args(kind)
        settings = {"help": helps.get(name, "").replace("%", "%%"), **_settings_of(kind), **more}
        if parameter.kind is not parameter.KEYWORD_ONLY:
            parser.add_argument(name, **{"metavar": name.upper(), **settings})
            continue
        is_required = parameter.default is parameter.empty
        settings |= {"required": True} if is_required else {"default": parameter.default}
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)


def _settings_of(kind: Any) -> dict[str, Any]:
    """Returns how ``add_argument`` reads values of an annotation."""
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is list:
        return {"action": "append", "type": get_args(kind)[0]}
    if get_args(kind):
        return _settings_of(get_args(kind)[0])  # of `int | None` the first
    return {} if kind is Any else {"type": kind}


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def console(piped_width: int) -> Console:
    """Returns a console for lines that are meant to be copied: output to a pipe is wrapped at this width."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=piped_width)


class Terminated(BaseException):
    """The process has received SIGTERM."""


def ended(command: str, work: Callable[[], int], *, runs_users_code: bool = False, says_stopped: bool = True) -> int:
    """Returns the result of ``work``. If it is stopped or fails, prints one line and returns the status for that.

    Args:
        command: The subcommand, for the line.
        work: The function to run.
        runs_users_code: Whether any exception may come from the user's code. Otherwise only ``ValueError`` and
            ``OSError`` are reported to the user.
        says_stopped: Whether a line is printed if it is stopped.
    """
    expected: tuple[type[Exception], ...] = (Exception,) if runs_users_code else (ValueError, OSError)
    try:
        with sigterm_raises():
            return work()
    except (KeyboardInterrupt, Terminated) as stopped:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the cleanup
        if says_stopped:
            _say(command, "stopped; nothing was left behind.")
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    except expected as error:
        _say(command, _in_words(error) if runs_users_code else str(error))
        return FAILED


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM raise, so that running code can clean up. Otherwise the process dies and leaves its files."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(*_: Any) -> NoReturn:
    raise Terminated


def _say(command: str, line: str) -> None:
    print(f"lightning-accel {command}: {line}", file=sys.stderr)


def _in_words(error: Exception) -> str:
    """Describes the error, with the user's line of code unless the message has it."""
    from lightning_accel.cli.users_code import CheckpointError
    from lightning_accel.deploy.errors import ExportError, MissingPackageError, QuantizeError, in_words, users_line_of

    if isinstance(error, CheckpointError | ExportError | QuantizeError | MissingPackageError):
        return str(error)
    line = users_line_of(error)
    said = str(error) if isinstance(error, ValueError | OSError) and str(error) else in_words(error)
    return f"{said} ({line})" if line and line not in said else said
