"""The settings of one run: what every technique is asked to do. Checked when made; to YAML and back without loss."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from lightning_accel.arguments import Arguments, RunSettings, Values, arguments
from lightning_accel.core.atomic_write import write_whole
from lightning_accel.core.checks import check_bool, check_choice, check_ending, check_names, switch
from lightning_accel.techniques.registry import RUN_SETTINGS, declarations


class Plan(Arguments, Values):
    """Which techniques a run uses, and how: the same keys as :class:`~lightning_accel.AccelPlugin`'s arguments.

    ``Plan(precision="bf16-mixed", compile="on")``; whatever is not given is as ``AccelPlugin()`` has it. YAML 1.1 reads
    a bare ``off`` or ``on`` as a boolean, so every technique takes ``False`` for ``"off"`` and, where there is
    something to switch on, ``True``. A plan cannot be changed; :meth:`replace` gives another.

    Raises:
        ValueError: A value is not among those allowed, or two settings contradict each other.
        TypeError: A value has the wrong type.
    """

    def _configure(self, settings: dict[str, Any]) -> None:
        declared = declarations()
        for name, declaration in declared.items():
            vars(self)[name] = declaration.read(settings.get(name, declaration.default))
        for name in RUN_SETTINGS:
            vars(self)[name] = settings.get(name, getattr(RunSettings, name))
        vars(self)["tune"] = switch(self.tune, on="auto")
        check_choice("tune", self.tune, ("auto", "off"))
        vars(self)["out_of_memory"] = switch(self.out_of_memory, on="answer")
        check_choice("out_of_memory", self.out_of_memory, ("answer", "split", "off"))
        vars(self)["report"] = switch(self.report, on="report.html")
        if isinstance(self.report, PathLike):
            vars(self)["report"] = str(self.report)
        check_ending("report", self.report, (".html", ".md", ".json"))
        for name in ("log", "strict", "verify"):
            check_bool(name, vars(self)[name])
        if self.report != "off" and not self.log:
            raise ValueError(f"report={self.report!r} with log=False: a report is made of what is logged. Drop one.")
        whole = self.settings()
        for name, declaration in declared.items():
            if not declaration.is_off(getattr(self, name)):
                declaration.technique.traits.conflicts(whole[name], whole, self.verify)

    def of(self, technique: str) -> Any:
        """The settings of one technique in their long form."""
        return declarations()[technique].settings_of(getattr(self, technique))

    def settings(self) -> dict[str, Any]:
        """The settings of every technique in their long form, by its name."""
        return {name: one.settings_of(getattr(self, name)) for name, one in declarations().items()}

    def is_off(self, technique: str) -> bool:
        """Whether a technique is switched off."""
        return declarations()[technique].is_off(getattr(self, technique))

    def replace(self, **changes: Any) -> Plan:
        """This plan with some settings changed."""
        return Plan(**{**vars(self), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values: valid keyword arguments of ``Plan`` and of ``AccelPlugin``."""
        declared = declarations()
        return {n: declared[n].write(value) if n in declared else value for n, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan with these settings, defaults elsewhere.

        Raises:
            ValueError: A key is no setting of a plan; the nearest one is named.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"A plan is a mapping of settings to values, not {type(values).__name__}: {values!r}.")
        check_names(values, allowed=list(arguments()), owner="a plan")
        return cls(**values)

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The plan as YAML text, written to ``path`` too when one is given."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        if path is not None:
            write_whole(Path(path), text)
        return text

    @classmethod
    def from_yaml(cls, source: str | Path) -> Plan:
        """Reads YAML text, or the file at a :class:`~pathlib.Path`."""
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        return cls.from_dict(yaml.safe_load(text) or {})

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"a plan cannot be changed; plan.replace({name}={value!r}) gives another")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"a plan cannot be changed: its {name} stays")

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: Any) -> Plan:
        copied = Plan.__new__(Plan)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied
