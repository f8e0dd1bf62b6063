"""The line that a report names is one that its reader has a use for."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_accel.core.user_frames import users_line

SITE = Path(sysconfig.get_path("purelib"))


def of_package(module: str) -> Callable[[Callable[[], Any]], Any]:
    """A function in a file of site-packages that calls its argument."""
    names: dict[str, Any] = {"__name__": module}
    file = SITE / f"{module.replace('.', '/')}.py"
    exec(compile("def step(function):\n    return function()\n", str(file), "exec"), names)
    step: Callable[[Callable[[], Any]], Any] = names["step"]
    return step


def behind(*modules: str) -> str:
    """What it is behind one function of each module, the first of which is called from here."""
    line: Callable[[], str] = users_line
    for module in reversed(modules):
        line = functools.partial(of_package(module), line)
    return line()


def test_it_is_the_users_own_innermost_one() -> None:
    assert behind().startswith(f"{__file__}:")
    assert behind("somelib.layers", "torch.nn.modules.module").startswith(f"{__file__}:")


def test_in_a_lightning_module_of_a_library_it_is_the_librarys_and_not_that_of_the_fit() -> None:
    line = behind("lightning.pytorch.trainer.trainer", "somelib.module", "somelib.layers", "torch.nn.modules.module")
    assert line == f"{SITE / 'somelib/layers.py'}:2, in step"


def test_where_nobody_elses_code_runs_within_lightnings_it_is_that_of_the_fit() -> None:
    assert behind("lightning.pytorch.trainer.trainer", "torch.nn.modules.module").startswith(f"{__file__}:")
