"""``lightning-accel cache``: what live trials have settled here, and what was compiled, listed or removed."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table


def add_parser(subcommands: Any) -> None:
    """Adds ``cache`` to the subcommands of an ``argparse`` parser."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "cache",
        help="what earlier runs have settled, and later ones begin with",
        description="What live trials have settled on this machine, and the kernels that compile, and the programs"
        " that XLA, have built for it. LIGHTNING_ACCEL_CACHE names another folder.",
    )
    parser.add_argument("--clear", action="store_true", help="remove all of it")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Lists what is remembered, or removes it; returns the exit status."""
    from lightning_accel.core import cache, kernel_cache
    from lightning_accel.core.byte_size import format_bytes
    from lightning_accel.tuning import tuning_cache  # late: --help answers without torch

    folder = cache.folder()
    compiled = {
        "compiled kernels": ("compile", kernel_cache.folder()),
        "compiled programs": ("XLA", cache.xla_programs()),
    }
    sizes = {name: size for name, (_, within) in compiled.items() if (size := cache.size_bytes(within))}
    if arguments.clear:
        more = "".join(f", and {format_bytes(size)} of {name}" for name, size in sizes.items())
        print(f"removed from {folder}: {tuning_cache.clear()}{more}")
        return 0
    table = Table("model", "settled", "over plain", "machine, versions", "written", box=None)
    complaints = []
    for entry in tuning_cache.entries():
        if isinstance(entry, tuning_cache.DamagedError):
            complaints.append(str(entry))
            continue
        choices = ", ".join(f"{arm}={choice}" for arm, choice in entry.tuning.choices.items()) or "nothing"
        whole = entry.tuning.whole
        machine = f"{entry.key['host']}, {entry.key['versions']}"
        table.add_row(entry.key["model"], choices, str(whole.interval) if whole else "", machine, entry.written)
    searches = len(list(tuning_cache.searches().glob("*.json")))
    allocators = len(list((folder / "allocators").glob("*.json")))
    if table.row_count:
        Console(width=160).print(table)
    elif not searches and not allocators and not sizes:
        print(f"nothing is remembered in {folder}")
    if searches:
        print(f"searches before a run (tune), of which a second call goes on: {searches}")
    if allocators:
        print(f"which allocator wins (run): {allocators}")
    for name, size in sizes.items():
        by, within = compiled[name]
        print(f"{name} ({by}): {format_bytes(size)} in {within}")
    for complaint in complaints:
        print(f"! {complaint}; --clear removes it")
    return 0
