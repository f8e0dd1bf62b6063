"""A report as HTML, as Markdown or as JSON: one file that needs no other, nor a network."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_accel.core.atomic_write import write_whole
from lightning_accel.core.measured import finite
from lightning_accel.evidence import charts, tables
from lightning_accel.evidence.figures import MEND, can_draw
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
    environment.filters |= tables.FILTERS
    return environment
