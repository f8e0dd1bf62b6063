"""``lightning-accel cache``: lists or removes the results of live trials and compiled programs on this machine."""

from __future__ import annotations

import shutil

from rich.console import Console
from rich.table import Table

_OTHERS = {
    "verdicts": "what trials have found, for the very same program",
    "searches": "searches before a run (tune), of which a second call goes on",
    "allocators": "which allocator wins (run)",
}


def cache(*, clear: bool = False) -> int:
    """What live trials have settled on this machine, and the kernels that compile, and the programs that XLA, have
    built for it. LIGHTNING_ACCEL_CACHE names another folder.

    Args:
        clear: remove all of it
    """
    from lightning_accel.core.byte_size import format_bytes
    from lightning_accel.experiment.store import STORES, DamagedError, Store, cache_folder, kernel_folder, xla_folder
    from lightning_accel.tuning.verdict_cache import TUNINGS  # late: --help answers without torch

    compiled = (("compiled kernels", "compile", kernel_folder()), ("compiled programs", "XLA", xla_folder()))
    sized = [(one, sum(path.stat().st_size for path in one[-1].rglob("*") if path.is_file())) for one in compiled]
    sizes = [(*one, format_bytes(size)) for one, size in sized if size]
    if clear:
        count = sum(Store(name).clear() for name in STORES)
        for _, _, within in compiled:
            shutil.rmtree(within, ignore_errors=True)
        more = "".join(f", and {size} of {name}" for name, _, _, size in sizes)
        print(f"removed from {cache_folder()}: {count}{more}")
        return 0
    table = Table("model", "settled", "over plain", "machine, versions", "written", box=None)
    lines = [f"{words}: {count}" for name, words in _OTHERS.items() if (count := len(list(Store(name).paths())))]
    complaints = []
    for entry in TUNINGS.entries():
        if isinstance(entry, DamagedError):
            complaints.append(f"! {entry}; --clear removes it")
            continue
        choices = ", ".join(f"{arm}={choice}" for arm, choice in entry.value.choices.items()) or "nothing"
        whole = str(entry.value.whole.interval) if entry.value.whole else ""
        machine = f"{entry.key['host']}, {entry.key['versions']}"
        table.add_row(entry.key["model"], choices, whole, machine, entry.written.isoformat())
    lines += [f"{name} ({by}): {size} in {within}" for name, by, within, size in sizes]
    if table.row_count:
        Console(width=160).print(table)
    elif not lines:
        lines = [f"nothing is remembered in {cache_folder()}"]
    for line in (*lines, *complaints):
        print(line)
    return 0
