"""The plan of a run: the ten settings, checked when a plan is made, and converted to YAML and back without loss."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import yaml

from lightning_accel.arguments import DEFAULTS, GROUPS, Arguments, MemoryOptions, Trust, place_of, written
from lightning_accel.core.atomic_write import write_whole
from lightning_accel.core.checks import nearest
from lightning_accel.core.options import Options, Rule, read
from lightning_accel.data import transform_config
from lightning_accel.techniques.registry import declarations, plain

_BY_NAME = ("techniques", "lossy")
_PAGE = Rule("a file that ends in .html, .md, .json", lambda name, path: path.endswith((".html", ".md", ".json")))


class Plan(Arguments):
    """The settings of a run, checked; they are those of :class:`~lightning_accel.AccelPlugin`.

    ``Plan(precision="bf16-mixed", techniques={"loss": "off"})`` has the defaults of ``AccelPlugin()`` elsewhere. YAML
    1.1 reads a bare ``off`` or ``on`` as a boolean. So ``False`` means ``"off"``, and ``True`` means ``"on"`` for
    settings that can be switched on. A plan is immutable; :meth:`replace` returns another one.

    Raises:
        ValueError: A value is not among those allowed, or two settings contradict each other.
        TypeError: A value has the wrong type.
    """

    __slots__ = ("_read",)  # not one of the settings, which are all that `vars` has

    _read: dict[str, Any]  # technique → its value or options, once somebody has asked
    precision: Any
    compile: Any
    memory: Any
    techniques: Mapping[str, Any]
    preprocess: tuple[Any, ...]
    loader: Any
    lossy: Mapping[str, Any]
    trust: Trust
    report: bool | str
    strict: bool

    def _configure(self, settings: dict[str, Any]) -> None:
        report = settings["report"]
        report = {"on": True, "off": False}.get(report, report) if isinstance(report, str) else report
        values = {name: kind.read(settings[name], name).short() for name, kind in GROUPS.items()}
        values |= {name: MappingProxyType(_by_name(name, settings[name])) for name in _BY_NAME}
        values["preprocess"] = declarations()["preprocess"].read(settings["preprocess"]).transforms
        values["trust"] = read("trust", settings["trust"], Trust)
        report = os.fspath(report) if isinstance(report, os.PathLike) else report
        values["report"] = read("report", report, bool | Annotated[str, _PAGE])
        values["strict"] = read("strict", settings["strict"], bool)
        vars(self).update({name: values[name] for name in DEFAULTS})
        object.__setattr__(self, "_read", {})
        whole = self.settings()
        for name, declaration in declarations().items():
            if not declaration.is_off(whole[name]):
                declaration.technique.traits.conflicts(whole[name], whole, self.trust != "unchecked")

    def of(self, technique: str) -> Any:
        """Returns the value or the options of one technique."""
        if technique not in self._read:
            self._read[technique] = self._options_of(technique)
        return self._read[technique]

    def _options_of(self, technique: str) -> Any:
        declaration, (setting, *names) = declarations()[technique], place_of(technique)
        if setting in _BY_NAME:
            return declaration.read(getattr(self, setting).get(technique, declaration.default))
        if not names:
            return declaration.read(getattr(self, setting))
        group = GROUPS[setting].read(getattr(self, setting), setting)
        values = [getattr(group, name) for name in names]
        if not declaration.has_options or isinstance(values[0], declaration.options):
            return values[0]
        own = [field.name for field in fields(declaration.options)]
        return declaration.options(**dict(zip(own, values, strict=False)))

    def settings(self) -> dict[str, Any]:
        """Returns the value or the options of every technique, by name."""
        return {name: self.of(name) for name in declarations()}

    def is_off(self, technique: str) -> bool:
        """Returns whether a technique is switched off."""
        return declarations()[technique].is_off(self.of(technique))

    @property
    def on_oom(self) -> Any:
        """Returns the response to a training step that runs out of memory: ``"answer"``, ``"split"`` or ``"off"``."""
        return MemoryOptions.read(self.memory).on_oom

    def replace(self, **changes: Any) -> Plan:
        """Returns a copy with other settings: ``plan.replace(compile="on", loss="off", trust="checked")``.

        A technique may be named directly, whichever setting holds it. ``techniques`` and ``lossy`` are merged: entries
        that are not named stay.
        """
        declared, found = declarations(), dict(vars(self))
        # A name that a setting and a technique share means the technique unless the value is a group of options.
        has_options = {name for name in found if isinstance(changes.get(name), Options | Mapping)}
        by_name = [name for name in changes if name in declared and name not in has_options]
        for name in changes.keys() - by_name:
            value = changes[name]
            merges = name in _BY_NAME and isinstance(value, Mapping)
            found[name] = {**found[name], **value} if merges else value
        for name in by_name:
            declaration, (setting, *names) = declared[name], place_of(name)
            value = declaration.read(changes[name])
            if setting in _BY_NAME:
                found[setting] = {**found[setting], name: value}
            elif not names:
                found[setting] = value.transforms
            else:
                parts = {names[0]: value}
                if declaration.has_options and len(names) > 1:
                    given = {value.switch(): declaration.switch(value), **value.given()}
                    pairs = zip(names, (field.name for field in fields(value)), strict=True)
                    parts = {there: given[here] for there, here in pairs if here in given}
                found[setting] = replace(GROUPS[setting].read(found[setting], setting), **parts)
        return Plan(**found)

    def given(self) -> dict[str, Any]:
        """Returns the settings that differ from the defaults."""
        values = {name: dict(value) if name in _BY_NAME else value for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value != DEFAULTS[name]}

    def to_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Returns the plan as plain values: valid keyword arguments of ``Plan`` and of ``AccelPlugin``.

        Args:
            whole: Whether to include settings at their defaults.
        """
        values = {name: plain(value) for name, value in (vars(self) if whole else self.given()).items()}
        if "preprocess" in values:
            values["preprocess"] = [transform_config.written(transform) for transform in self.preprocess]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Makes the plan that has these settings, and defaults elsewhere.

        Raises:
            TypeError: A key is not a setting; the message names the nearest one.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"A plan is a mapping of settings to values, not {type(values).__name__}: {values!r}.")
        return cls(**{str(name): value for name, value in values.items()})

    def to_yaml(self, path: str | Path | None = None) -> str:
        """Returns the plan as YAML text, and writes the text to ``path`` if a path is given."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        if path is not None:
            write_whole(Path(path), text)
        return text

    @classmethod
    def from_yaml(cls, source: str | Path) -> Plan:
        """Makes a plan from YAML text, or from the file at a :class:`~pathlib.Path`."""
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
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    def __copy__(self) -> Plan:
        return self

    def __reduce__(self) -> Any:
        return Plan.from_dict, (self.given(),)


def _by_name(setting: str, values: Any) -> dict[str, Any]:
    """Checks the value of ``techniques`` or ``lossy`` and returns the entries that differ from the defaults."""
    if not isinstance(values, Mapping):
        example = {"techniques": "{'loss': 'off'}", "lossy": "{'float8': 'tensorwise'}"}[setting]
        raise TypeError(f"{setting}={values!r}: give a mapping of a technique's name to its value, such as {example}.")
    declared = declarations()
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in declared:
            allowed = [one for one in declared if place_of(one) == (setting,)]
            hint = nearest(str(name), list(declared)) or "."
            raise ValueError(f"{setting} has no technique {name!r}{hint} Allowed: {', '.join(allowed)}.")
        if place_of(name) != (setting,):
            raise ValueError(f"{setting} does not take {name!r}: {written(name, value)} sets it.")
        value = declared[name].read(value, f"{setting}.{name}")
        if value != declared[name].default:
            found[name] = value.short() if isinstance(value, Options) else value
    return found


def without_answers(memory: Any) -> MemoryOptions:
    """Returns a plan's ``memory`` with ``on_oom="off"``, so that a lack of memory ends the run."""
    return replace(MemoryOptions.read(memory), on_oom="off")
