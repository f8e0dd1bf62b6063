"""Writes ``report.schema.json``, which says what a report's JSON form holds, from the dataclasses of a page.

python tests/report_schema.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lightning_accel.evidence import report_model

SCHEMA = Path(report_model.__file__).with_name("report.schema.json")


def schema() -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TypeAdapter(report_model.Page).json_schema()}


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
    print(f"{SCHEMA} is written")
