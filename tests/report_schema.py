"""Writes ``report.schema.json`` and ``record.schema.json`` from the dataclasses of a page and of a run's events.

python tests/report_schema.py
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lightning_accel import evidence
from lightning_accel.evidence import report_model
from lightning_accel.evidence.events import KINDS

SCHEMA = Path(report_model.__file__).with_name("report.schema.json")
RECORD_SCHEMA = SCHEMA.with_name("record.schema.json")
_DIALECT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}


def schema() -> dict[str, Any]:
    """Of a report."""
    return {**_DIALECT, **_described(TypeAdapter(report_model.Page).json_schema())}


def record_schema() -> dict[str, Any]:
    """Of a line of a record: its kind decides what it holds."""
    events = {kind: TypeAdapter(event).json_schema() for kind, event in KINDS.items()}
    shared = {name: one for event in events.values() for name, one in event.pop("$defs", {}).items()}
    for kind, event in events.items():
        event["properties"] = {"kind": {"const": kind}, **event["properties"]}
        event["required"] = ["kind", *event.get("required", [])]
    return {**_DIALECT, **_described({"title": "Event", "oneOf": [*events.values()], "$defs": shared})}


def _described(found: Any) -> Any:
    """With what stands beside each field in the code, or above it."""
    if isinstance(found, list):
        return [_described(one) for one in found]
    if not isinstance(found, dict):
        return found
    said = _comments().get(str(found.get("title")), {}) if "properties" in found else {}
    for name, one in found.get("properties", {}).items():
        if name in said and "description" not in one:
            one["description"] = said[name]
    return {name: _described(one) for name, one in found.items()}


def _comments() -> dict[str, dict[str, str]]:
    """Class → field → its comment, of all dataclasses of the evidence."""
    modules = [
        importlib.import_module(one.name)
        for one in pkgutil.iter_modules(evidence.__path__, "lightning_accel.evidence.")
    ]
    classes = {one.__name__: one for module in modules for one in vars(module).values() if is_dataclass(one)}
    return {name: _comments_of(inspect.getsource(one)) for name, one in classes.items()}


def _comments_of(source: str) -> dict[str, str]:
    found, above = {}, []
    for line in source.splitlines():
        if match := re.fullmatch(r"    # (.*)", line):
            above.append(match[1])
            continue
        if match := re.fullmatch(r"    (\w+): [^#]*?(?:  # (.*))?", line):
            said = " ".join([*above, *filter(None, [match[2]])])
            found |= {match[1]: said} if said else {}
        above = []
    return found


if __name__ == "__main__":
    for path, found in ((SCHEMA, schema()), (RECORD_SCHEMA, record_schema())):
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{path} is written")
