"""Writes ``report.schema.json`` and ``record.schema.json`` from the dataclasses of a page and of a run's events.

python tests/report_schema.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lightning_accel.evidence import report_model
from lightning_accel.evidence.events import KINDS

SCHEMA = Path(report_model.__file__).with_name("report.schema.json")
RECORD_SCHEMA = SCHEMA.with_name("record.schema.json")
_DIALECT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}


def schema() -> dict[str, Any]:
    """Of a report."""
    return {**_DIALECT, **TypeAdapter(report_model.Page).json_schema()}


def record_schema() -> dict[str, Any]:
    """Of a line of a record: its kind decides what it holds."""
    events = {kind: TypeAdapter(event).json_schema() for kind, event in KINDS.items()}
    shared = {name: one for event in events.values() for name, one in event.pop("$defs", {}).items()}
    for kind, event in events.items():
        event["properties"] = {"kind": {"const": kind}, **event["properties"]}
        event["required"] = ["kind", *event.get("required", [])]
    return {**_DIALECT, "title": "Event", "oneOf": [*events.values()], "$defs": shared}


if __name__ == "__main__":
    for path, found in ((SCHEMA, schema()), (RECORD_SCHEMA, record_schema())):
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{path} is written")
