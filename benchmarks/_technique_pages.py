"""Writes what the pages of docs/techniques, their list and the page of settings take from elsewhere.

What a setting takes is what its technique declares; figures are those that the measurements left. Called by render.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_accel.arguments import DEFAULTS, Arguments, place_of
from lightning_accel.arguments import GROUPS as WITH_OPTIONS
from lightning_accel.claims.machine import title
from lightning_accel.techniques.registry import declarations, documented

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"

GROUPS = {
    "Arithmetic": ("precision", "matmul_precision", "float8"),
    "Kernels": (
        *("flash_attention", "memory_format", "cudnn_benchmark", "inplace_activations"),
        *("loss", "optimizer", "compile", "graphs"),
    ),
    "Memory": (
        *("memory_budget", "gradient_checkpointing", "activation_offloading", "sparse_activations"),
        "optimizer_8bit",
    ),
    "Data": ("preprocess", "loader", "padding"),
    "Host": ("allocator", "threads"),
}


@dataclass(frozen=True)
class Figures:
    """Rows and columns of one measurement.

    Attributes:
        name: Of its file or folder in docs/results.
        column: By which rows are chosen.
        starts: What that column begins with in the rows that are taken; with nothing named, all are.
        columns: Which are shown, by their places; with nothing named, all are.
    """

    name: str
    column: int = 0
    starts: tuple[str, ...] = ()
    columns: tuple[int, ...] = ()


def _added(*starts: str) -> Figures:
    """What a technique adds to a step, of all that benchmarks/techniques.py measures."""
    return Figures("techniques", column=1, starts=starts)


MEASURED = {
    "flash_attention": (_added("flash_attention"), Figures("attention_cpu", starts=("hand-written",))),
    "loss": (Figures("linear_cross_entropy", columns=(0, 1, 2, 3, 4, 6, 7, 8, 9, 13, 14, 15, 16)),),
    "optimizer": (
        _added("optimizer="),
        Figures("optimizer_steps", starts=("a GPT's",), columns=(0, 1, 2, 3, 4, 5)),
    ),
    "compile": (_added("compile"), Figures("second_run", columns=(0, 1, 2, 3, 6, 7))),
    "memory_budget": (Figures("memory_budget"),),
    "gradient_checkpointing": (
        Figures("checkpointing"),
        Figures("memory_modes", column=1, starts=("plain", "selective", "full")),
    ),
    "activation_offloading": (Figures("memory_modes", column=1, starts=("plain", "disk")),),
    "sparse_activations": (Figures("packing_steps"),),
    "preprocess": (Figures("preprocessing"), Figures("device_pipeline")),
    "allocator": (_added("allocator"), Figures("allocator")),
}
"""Figures of a page; of a technique that is not named, what it adds to a step."""

UNMEASURED = {
    "inplace_activations": "it has no row in what `benchmarks/techniques.py` left; what operations in place save is"
    " [claim](../claims.md) 9.",
    "float8": "it needs a GPU.",
    "cudnn_benchmark": "it needs a GPU.",
    "graphs": "it needs a GPU.",
    "optimizer_8bit": "what it saves is states of a large model on a GPU.",
    "loader": "what it gains is what a run of yours waits for its loader, which its report says.",
    "padding": "what it gains is for kernels of a GPU.",
}


def pages() -> dict[Path, str]:
    """Every page that is written here, whole."""
    folder = DOCS / "techniques"
    texts = {folder / f"{name}.md": _page(name) for name in declarations()}
    overview = folder / "index.md"
    texts[overview] = filled(overview.read_text(encoding="utf-8"), "techniques", _overview())
    settings = DOCS / "reference" / "settings.md"
    texts[settings] = filled(settings.read_text(encoding="utf-8"), "settings", _settings())
    return texts


def short_list() -> str:
    """The techniques by what they are for, a line a group, as in README.md."""
    return "\n".join(
        f"- {group}: " + ", ".join(f"[`{name}`](docs/techniques/{name}.md)" for name in names)
        for group, names in GROUPS.items()
    )


def filled(text: str, name: str, block: str) -> str:
    """A page with one of its blocks written anew."""
    pattern = rf"(<!-- {name}:begin[^\n]*-->).*?(<!-- {name}:end -->)"
    assert re.search(pattern, text, flags=re.DOTALL), f"there is no block {name!r} in the page"
    return re.sub(pattern, lambda match: f"{match[1]}\n{block}\n{match[2]}", text, flags=re.DOTALL)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _page(name: str) -> str:
    text = (DOCS / "techniques" / f"{name}.md").read_text(encoding="utf-8")
    row = [f"`{_place(name)}`", _default(name), declarations()[name].exactness]
    table = markdown(("setting", "default", "numbers"), [row])
    text = filled(text, "setting", f"{table}\n\nValues: {_plainly(_doc(name))}")
    return filled(text, "measured", "\n\n".join(_figures(name)))


def _doc(name: str) -> str:
    """What the values of a technique mean, from where it is set."""
    setting, *options = place_of(name)
    return documented(WITH_OPTIONS[setting])[options[0]] if options else declarations()[name].doc


def _place(name: str) -> str:
    """Where a technique is set, as flags write it."""
    setting, *options = place_of(name)
    last = name if setting in ("techniques", "lossy") else (options or [""])[0]
    return ".".join(filter(None, [setting, last]))


def _overview() -> str:
    parts = []
    for group, names in GROUPS.items():
        rows = []
        for name in names:
            text = (DOCS / "techniques" / f"{name}.md").read_text(encoding="utf-8")
            what = text.splitlines()[0].partition(": ")[2]
            link = f"[`{name}`]({name}.md)"
            words = (what, _section(text, "When it helps"), _section(text, "When it does not"))
            rows.append([link, f"`{_place(name)}`", _default(name), declarations()[name].exactness, *words])
        columns = ("technique", "setting", "default", "numbers", "what it does", "when it helps", "when it does not")
        parts.append(f"## {group}\n\n{markdown(columns, rows)}")
    return "\n\n".join(parts)


def _settings() -> str:
    docs = documented(Arguments.__init__)
    rows = [[f"`{name}`", f"`{_yaml(value)}`", _plainly(docs[name])] for name, value in DEFAULTS.items()]
    parts = [markdown(("setting", "default", "values"), rows)]
    for setting, options in WITH_OPTIONS.items():
        docs = documented(options)
        rows = [[f"`{setting}.{name}`", f"`{_yaml(getattr(options(), name))}`", _plainly(docs[name])] for name in docs]
        parts.append(f"## `{options.__name__}`\n\n{markdown(('option', 'default', 'values'), rows)}")
    rows = [
        [f"[`{name}`](../techniques/{name}.md)", f"`{_place(name)}`", _default(name), _plainly(one.doc)]
        for name, one in declarations().items()
        if len(place_of(name)) == 1 and name != "preprocess"
    ]
    parts.append(f"## Techniques by their names\n\n{markdown(('technique', 'setting', 'default', 'values'), rows)}")
    return "\n\n".join(parts)


def _default(name: str) -> str:
    declaration = declarations()[name]
    return f"`{_yaml(declaration.switch(declaration.default))}`"


def _yaml(value: Any) -> str:
    """A default as YAML has it."""
    return "[]" if value == () else str(value).lower() if isinstance(value, bool) else str(value)


def _plainly(text: str) -> str:
    """What a docstring says, in Markdown."""
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?([\w]+)`", r"`\1`", text).replace("``", "`")


def _section(text: str, heading: str) -> str:
    """The one paragraph under a heading, with links as seen from the folder."""
    paragraph = text.split(f"\n## {heading}\n")[1].split("\n## ")[0].strip()
    assert "\n\n" not in paragraph, f"{heading!r} is one paragraph, for the table of techniques/index.md"
    return " ".join(paragraph.split())


def _figures(name: str) -> Iterator[str]:
    found = False
    for figures in MEASURED.get(name, (_added(name),)):
        paths = [*RESULTS.glob(f"{figures.name}.json"), *sorted(RESULTS.glob(f"{figures.name}/*.json"))]
        for path in paths:
            record = json.loads(path.read_text(encoding="utf-8"))
            rows = [row for row in record["rows"] if row[figures.column].startswith(figures.starts or "")]
            if rows:
                found = True
                places = figures.columns or range(len(record["columns"]))
                table = markdown(*_chosen(record["columns"], rows, places))
                yield f"`{record['command']}` on {where(record['machine'])}:\n\n{table}"
    if found:
        yield "What the columns mean, and all other figures: [results by machine](../results/README.md)."
    else:
        yield f"Not measured by a script yet: {UNMEASURED[name]}"


def _chosen(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], places: Sequence[int]
) -> tuple[list[str], list[list[Any]]]:
    return [columns[place] for place in places], [[row[place] for place in places] for row in rows]


def where(machine: dict[str, Any]) -> str:
    """The machine that measured a table, and its torch."""
    cores = f"{machine['device']}, {machine['cores']} cores"
    return f"{title(machine) if 'instructions' in machine else cores}, torch {machine['torch']}"
