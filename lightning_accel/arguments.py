"""What `Plan` and `AccelPlugin` take: the settings of every technique that there is, and those of a run.

The techniques declare them (`techniques/registry.py`). Editors and type checkers, which run nothing, read them in
`arguments.pyi`, which `make stub` writes and a test compares with the declarations.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

from lightning_accel.core.checks import nearest
from lightning_accel.techniques.registry import RUN_SETTINGS, declarations, documented, on_change


class RunSettings:
    """The settings that belong to no technique.

    Attributes:
        tune: ``"auto"``: what is kept is decided by whole training steps, while they train, so that the run is never
            slower than plain; ``"off"``: by the trials of the parts alone.
        out_of_memory: ``"answer"``: where a training step under Lightning runs out of memory, what needs less and
            changes no number (packing, checkpointing, offloading) is put on, and the step runs again; where that cannot
            be, the run ends with a page that names who asked, who held what, and what would fit. ``"split"``: the
            same, and where nothing is left to put on, batches go through ``training_step`` in halves, quarters, and so
            on, within one step; gradients are those of the whole batch where the loss is a mean over samples and no
            batch norm trains. ``"off"``: it ends with the error as it is.
        report: A file that ends in ``.html``, ``.md`` or ``.json``, in which each fit leaves its report: what it has
            come to, where its time and memory went, what to do next. Where it cannot be written, it is beside the run's
            record. ``"off"``: none, but for a run that dies of a lack of memory, which leaves one beside its record.
        log: Have a :class:`~lightning_accel.callbacks.SpeedMemoryLogger` tell the loggers, unless a callback does.
        strict: Raise where the default is to warn and go on.
        verify: Try every change on the first batch and keep only those that agree with the original. Switched off,
            changes are applied untried.
    """

    tune: Literal["auto", "off"] = "auto"
    out_of_memory: Literal["answer", "split", "off"] = "answer"
    report: str = "off"
    log: bool = True
    strict: bool = False
    verify: bool = True


class Arguments:
    """Takes the settings as keyword arguments, for a class on top of it."""

    def __init__(self, **settings: Any) -> None:
        known = [*declarations(), *RUN_SETTINGS]
        for name in settings:
            if name not in known:  # as Python says it, and what may have been meant
                message = f"{type(self).__name__}() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{message}{nearest(name, known) or '.'} Allowed: {', '.join(known)}.")
        self._configure(settings)

    def _configure(self, settings: dict[str, Any]) -> None:
        """What the class makes of them."""


class Values:
    """The settings as attributes."""


def arguments() -> dict[str, tuple[Any, Any, str]]:
    """Every argument in its order: name → type, default, description."""
    found = {name: (one.annotation, one.default, one.doc) for name, one in declarations().items()}
    types, docs = inspect.get_annotations(RunSettings, eval_str=True), documented(RunSettings)
    return found | {name: (kind, getattr(RunSettings, name), docs[name]) for name, kind in types.items()}


def described() -> str:
    """The descriptions of all arguments, as a docstring has them."""
    return "Args:\n" + "".join(f"    {name}: {doc}\n" for name, (_, _, doc) in arguments().items())


def _show() -> None:
    """Lets :func:`inspect.signature` and :func:`help`, and with them Lightning's command line, see the arguments."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, (kind, default, _) in arguments().items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    Arguments.__init__.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    Arguments.__init__.__doc__ = described()


_show()
on_change(_show)
