"""One-line errors on Lightning's command line for wrong settings of a plugin, in place of a page or a traceback."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

from lightning_accel.arguments import Arguments, unknown

_UNKNOWN = re.compile(r"class_path 'lightning_accel\.(?:[^']*\.)?(?P<owner>Accel\w*Plugin)':\s+Option '(?P<key>[^']+)'")


def answer(message: str) -> str:
    """Returns the one-line error for a jsonargparse message on a plugin's settings; empty if it is on others."""
    if Arguments.complaint and Arguments.complaint in message:
        return Arguments.complaint
    if (found := _UNKNOWN.search(message)) is None:
        return ""
    value = re.search(re.escape(repr(found["key"])) + r"(?:: |, val=)'?(.+?)'?[,})]", message)
    return unknown(found["owner"], found["key"], value[1] if value else "...")


def complain(parser: Any, line: str) -> None:
    """Ends the process with an error line, unless the parser must not exit."""
    if parser.exit_on_error:
        parser.exit(2, f"error: {line}\n")


def answer_in_one_line() -> None:
    """Patches the imported command lines of Lightning."""
    for package in ("lightning.pytorch.cli", "pytorch_lightning.cli"):
        module = sys.modules.get(package)
        for name, method in (("LightningArgumentParser", "error"), ("LightningCLI", "instantiate_classes")):
            kind = getattr(module, name, None)
            if kind is not None and not hasattr(getattr(kind, method), "is_in_one_line"):
                setattr(kind, method, _in_one_line(getattr(kind, method)))


def _in_one_line(original: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and (line := answer(str(args[0]))):
            complain(self, line)
        try:
            return original(self, *args, **kwargs)
        except ValueError as error:
            if line := answer(str(error)):
                complain(self.parser, line)
            raise

    method.is_in_one_line = True  # type: ignore[attr-defined]
    return method
