"""A report as HTML, as Markdown or as JSON: one file that needs no other, nor a network."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.evidence import charts
from lightning_accel.evidence.page import Node, Page

Cell = tuple[str, Any]
"""What is shown, and by what it is sorted."""


def to_html(page: Page) -> str:
    """The page with its charts, where matplotlib is there to draw them, and all numbers as tables."""
    return _environment(autoescape=True).get_template("report.html.j2").render(page=page, charts=charts.of(page))


def to_markdown(page: Page) -> str:
    """The same as text."""
    text = _environment(autoescape=False).get_template("report.md.j2").render(page=page)
    text = re.sub(r"\s*\n(#+ )", r"\n\n\1", text)  # a heading stands by itself, whatever came of the part before
    return "\n".join(line.rstrip() for line in text.strip().split("\n")) + "\n"


def to_json(page: Page) -> str:
    """The same as JSON, by ``report.schema.json``."""
    return json.dumps(_finite(asdict(page)), indent=1)


FORMS: Mapping[str, Callable[[Page], str]] = {".html": to_html, ".md": to_markdown, ".json": to_json}
"""By a file's ending."""


def write(page: Page, path: Path) -> None:
    """Writes a report whole or not at all, in the form that the file's ending says.

    Raises:
        OSError: The file cannot be written.
        ValueError: No form has that ending.
    """
    text = form_of(path)(page)
    path.parent.mkdir(parents=True, exist_ok=True)
    number, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(beside, 0o644)  # a temporary file is its owner's alone
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def form_of(path: Path) -> Callable[[Page], str]:
    """What writes a file of that name.

    Raises:
        ValueError: Nothing does.
    """
    if path.suffix not in FORMS:
        raise ValueError(f"a report is written to a file that ends in {', '.join(FORMS)}, not {str(path)!r}")
    return FORMS[path.suffix]


def _environment(*, autoescape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("lightning_accel.evidence"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "cell": lambda text: str(text).replace("|", "\\|").replace("\n", " "),
        "number": lambda value: "" if value is None else f"{float(value):,.4g}",
        "share": lambda value: "" if value is None else f"{float(value):.1%}",
        "interval": lambda one: f"{one['ratio']:.2f}x {_bounds(one)}",
        "walk": lambda node: list(_walk(node)),
        "flops_rate": lambda node: _rate(node.flops / 1e9, node.ms),
        "bytes_rate": lambda node: _rate(node.moved_bytes / 1e9, node.ms),
        "rows": _rows,
        "part_rows": lambda page: _shares(page.parts_ms, lambda ms: f"{ms:.3g}"),
        "memory_rows": lambda page: _shares(page.memory, format_bytes),
        "trial_rows": _trial_rows,
        "layout_rows": _layout_rows,
        "epoch_rows": _epoch_rows,
    }
    return environment


def _rate(amount: float, ms: float) -> str:
    return f"{amount / ms * 1e3:.3g}" if ms > 0 and amount else ""


def _bounds(one: Mapping[str, Any]) -> str:
    return f"[{one['low']:.2f}, {one['high']:.2f}]".replace("inf", "∞")


def _walk(node: Node, depth: int = 0) -> Iterator[tuple[int, str, Node]]:
    yield depth, node.name, node
    for part in node.parts:
        yield from _walk(part, depth + 1)


def _rows(values: Iterable[Any], *names: str) -> list[list[Cell]]:
    def shown(value: Any) -> Cell:
        return (f"{value:.2f}x", value) if isinstance(value, float) else (str(value), value)

    return [[shown(getattr(one, name)) for name in names] for one in values]


def _shares(values: Mapping[str, float], shown: Callable[[Any], str]) -> list[list[Cell]]:
    total = sum(values.values()) or 1
    return [[(name, name), (shown(size), size), (f"{size / total:.1%}", size)] for name, size in values.items()]


def _trial_rows(page: Page) -> list[list[Cell]]:
    return [
        [
            (one["name"], one["name"]),
            (one["verdict"], one["verdict"]),
            (f"{one['ratio']:.3f}x", one["ratio"]),
            (_bounds(one), one["low"]),
            (f"{one['steps']:,}", one["steps"]),
        ]
        for one in page.trials
    ]


def _layout_rows(copies: Iterable[Mapping[str, Any]]) -> list[list[Cell]]:
    return [
        [
            (one["line"] or f"backward pass of {one['module'] or 'the model'}", one["line"]),
            (one["made_by"], one["made_by"]),
            (f"{one['count']:,}", one["count"]),
            (format_bytes(one["moved_bytes"]), one["moved_bytes"]),
            (f"{one['ms']:.3g}", one["ms"]),
        ]
        for one in copies
    ]


def _epoch_rows(epochs: Iterable[Mapping[str, Any]]) -> list[list[Cell]]:
    names = ("epoch", "steps_per_sec", "step_ms_p50", "step_ms_p95", "data_wait_frac", "peak_memory_mib")
    values = [[one.get(name) for name in names] for one in epochs]
    return [[("", -1) if value is None else (f"{value:,.4g}", value) for value in row] for row in values]


def _finite(value: Any) -> Any:
    """With null for what JSON has no number for."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
