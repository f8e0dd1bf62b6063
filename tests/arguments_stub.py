"""Writes lightning_accel/arguments.pyi: what editors and type checkers, which run nothing, see of the settings.

python tests/arguments_stub.py
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import lightning_accel.arguments
from lightning_accel.arguments import arguments

STUB = Path(lightning_accel.arguments.__file__).with_suffix(".pyi")
HEAD = '''"""Written by `make stub` from what the techniques declare: see arguments.py."""'''


def stub() -> str:
    """The text of the stub, as ruff formats it."""
    modules: dict[str, set[str]] = {"typing": {"Any"}}
    parameters, docs, values = [], [], []
    for name, (kind, default, doc) in arguments().items():
        parameters.append(f"{name}: {_written(kind, modules)} = {default!r},")
        docs.append(textwrap.fill(f"{name}: {doc}", 116, initial_indent=" " * 12, subsequent_indent=" " * 16))
        values.append(f"    {name}: {_written(kind, modules)}")
    imports = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(modules.items())]
    body = f'''
class RunSettings:
    out_of_memory: str
    log: bool
    strict: bool
    verify: bool

class Arguments:
    def __init__(self, *, {" ".join(parameters)}) -> None:
        """
        Args:
{chr(10).join(docs)}
        """
    def _configure(self, settings: dict[str, Any]) -> None: ...

class Values:
{chr(10).join(values)}

def arguments() -> dict[str, tuple[Any, Any, str]]: ...
def described() -> str: ...
'''
    text = "\n".join([HEAD, "", *imports, body])
    for step in (["check", "--fix", "--quiet", "--select", "I"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *step, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _written(kind: Any, modules: dict[str, set[str]]) -> str:
    """An annotation as source text; what it takes is added to the imports."""
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " | ".join(_written(one, modules) for one in of)
    if origin is Literal:
        modules["typing"].add("Literal")
        return f"Literal[{', '.join(map(repr, of))}]"
    if origin is not None:
        return f"{_written(origin, modules)}[{', '.join(_written(one, modules) for one in of)}]"
    if kind is type(None):
        return "None"
    if kind is Any:
        return "Any"
    if kind.__module__ != "builtins":
        modules.setdefault(kind.__module__, set()).add(kind.__qualname__)
    return str(kind.__qualname__)


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    print(f"{STUB} is written")
