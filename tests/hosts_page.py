"""Writes the tables of docs/hosts.md: what the techniques say of machines that are not at hand.

python tests/hosts_page.py

A test holds that the page is what this writes, on whatever machine it runs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from lightning_accel.cli.decisions import ExampleModel, forecasts
from lightning_accel.core.host import Host
from lightning_accel.settings import Plan
from lightning_accel.techniques.technique_context import Forecast
from support.simulated_hosts import SIMULATED_HOSTS, when_asked

PAGE = Path(__file__).parent.parent / "docs" / "hosts.md"

COLUMNS = {
    "precision: auto": "precision",
    "matmul_precision: auto": "products",
    "flash_attention: auto": "attention",
    "inplace_activations: auto": "in place",
    "memory_format: auto": "memory format",
    "cudnn_benchmark: auto": "cuDNN",
    "loss: auto": "loss",
    "optimizer: auto": "optimizer",
    "allocator: auto": "allocator",
    "gradient_checkpointing: full": "checkpointing",
    "memory_budget: 12GiB": "memory budget",
    "activation_offloading: disk": "offloading",
    "sparse_activations: auto": "sparse activations",
    "graphs: on": "graphs",
    "compile: on": "compile",
}


def page() -> str:
    """docs/hosts.md with its tables written anew."""

    def block(match: re.Match[str]) -> str:
        chosen = {name: host for name, host in SIMULATED_HOSTS.items() if match[2] in ("all", host.kind)}
        written = _overview(chosen) if match[2] == "all" else "\n\n".join(itertools.starmap(_section, chosen.items()))
        return f"{match[1]}\n{written}\n{match[3]}"

    text = PAGE.read_text(encoding="utf-8")
    return re.sub(r"(<!-- hosts:begin (\w+)[^\n]*-->).*?(<!-- hosts:end -->)", block, text, flags=re.DOTALL)


def _overview(hosts: dict[str, Host]) -> str:
    model = ExampleModel()
    rows = []
    for name, host in hosts.items():
        found = forecasts(Plan(), host, model) | when_asked(host, model)
        rows.append([name, *(found[setting].brief for setting in COLUMNS)])
    return _table(["", *COLUMNS.values()], rows)


def _section(name: str, host: Host) -> str:
    model = ExampleModel()
    parts = [f"### {name}", f"`{_written(host)}`"]
    parts.append(_table(["`AccelPlugin()`", "does"], _rows(forecasts(Plan(), host, model))))
    parts.append(_table(["asked for by name", "does"], _rows(when_asked(host, model))))
    return "\n\n".join(parts)


def _rows(forecasts: Mapping[str, Forecast]) -> Iterable[list[str]]:
    """Settings of which the same is to be said share a line, and those of one name the name."""
    lines: dict[str, dict[str, list[str]]] = {}
    for setting, said in forecasts.items():
        name, _, value = setting.partition(": ")
        words = f"no: {said.words}" if said.brief == "no" else said.words
        lines.setdefault(words, {}).setdefault(name, []).append(value)
    for words, settings in lines.items():
        yield [", ".join(f"`{name}: {'`, `'.join(values)}`" for name, values in settings.items()), words]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _written(host: Host) -> str:
    """As in code, without what is left at its default."""
    given = []
    for field in fields(host):
        value = getattr(host, field.name)
        if value != field.default:
            value = f"frozenset({sorted(value)})" if isinstance(value, frozenset) else repr(value)
            given.append(f"{field.name}={value}".replace("'", '"'))
    return f"Host({', '.join(given)})"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
