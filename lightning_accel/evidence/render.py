"""A report as HTML, as Markdown or as JSON: one file that needs no other, nor a network."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_accel.core.atomic_write import write_whole
from lightning_accel.core.measured import finite
from lightning_accel.evidence import charts, tables
from lightning_accel.evidence.amounts import figure, size
from lightning_accel.evidence.figures import MEND, can_draw
from lightning_accel.evidence.headline import gain_of
from lightning_accel.evidence.report_model import Page


def to_html(page: Page) -> str:
    """The page with its charts, where matplotlib is there to draw them, and all numbers as tables."""
    template = _environment(autoescape=True).get_template("report.html.j2")
    return template.render(
        page=page, tables=tables.of(page), charts=charts.of(page), how_to_draw="" if can_draw() else MEND
    )


def to_markdown(page: Page) -> str:
    """The same as text."""
    text = _environment(autoescape=False).get_template("report.md.j2").render(page=page, tables=tables.of(page))
    text = re.sub(r"\s*\n(#+ )", r"\n\n\1", text)  # a heading stands by itself, whatever came of the part before
    return "\n".join(line.rstrip() for line in text.strip().split("\n")) + "\n"


def to_json(page: Page) -> str:
    """The same as JSON, by ``report.schema.json``."""
    return json.dumps(finite(asdict(page)), indent=1, allow_nan=False)


FORMS: Mapping[str, Callable[[Page], str]] = {".html": to_html, ".md": to_markdown, ".json": to_json}
"""By a file's ending."""


def write(page: Page, path: Path) -> None:
    """Writes a report whole or not at all, in the form that the file's ending says.

    Raises:
        OSError: The file cannot be written.
        ValueError: No form has that ending.
    """
    write_whole(path, form_of(path)(page))


def form_of(path: Path) -> Callable[[Page], str]:
    """What writes a file of that name.

    Raises:
        ValueError: Nothing does.
    """
    if path.suffix not in FORMS:
        raise ValueError(f"a report is written to a file that ends in {', '.join(FORMS)}, not {str(path)!r}")
    return FORMS[path.suffix]


@functools.cache  # with the templates that it has compiled, a quarter of a second each
def _environment(*, autoescape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("lightning_accel.evidence"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    return environment


def _markdown(value: Any) -> str:
    """Of any letters, on one line, as they are read, and nothing of them as markup."""
    escaped = re.sub(r"([\\`*])", r"\\\1", str(value).replace("&", "&amp;").replace("<", "&lt;"))
    return " ".join(escaped.replace("__", r"\_\_").replace("](", r"]\(").split())


def _code(value: str) -> str:
    """As code within a line; backticks of its own are in longer ones."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", value)), default=0))
    space = " " * (len(ticks) > 1)
    return f"{ticks}{space}{' '.join(value.split())}{space}{ticks}"


def _fence(value: str, language: str) -> str:
    """As a block of code; backticks of its own are in longer ones."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", value)), default=0))
    return f"{ticks}{language}\n{value}\n{ticks}"


_FILTERS: Mapping[str, Callable[..., Any]] = {
    "bytes": size,
    "figure": figure,
    "text": _markdown,
    "cell": lambda value: _markdown(value).replace("|", "\\|"),
    "code": _code,
    "fence": _fence,
    "part": lambda value, whole: f"{100 * value / whole:.1f}%" if whole else "0%",
    "ms": lambda value: tables.milliseconds(value)[0],
    "gain": gain_of,
}
