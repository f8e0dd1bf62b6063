"""Tracks of their own in a trace for steps, their phases, and each technique: what a viewer shows before threads."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_accel.callbacks._ranges import with_techniques

PROCESS = "lightning-accel"
STEPS, PHASES = "steps", "phases"
_STEP = re.compile(r"step \d+( \[|$)")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')


def add_tracks(path: Path, phases: Collection[str], acting: Mapping[str, list[str]]) -> None:
    """Adds them to the file of a trace, in Chrome's format: a process with a named thread for each.

    The ranges stay in the threads that they are of, among torch's operations; tracks have copies. Ranges of two
    threads may overlap, which viewers do not draw on one track: then there are two of a name.

    Args:
        path: As torch's profiler has written it, compressed.
        phases: The names of a step's parts.
        acting: Of each site, the techniques that act there; of site ``""``, those that act on whole steps.

    Raises:
        OSError: It cannot be read or written.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        text = file.read()
    added = [json.dumps(event) for event in _tracks(json.loads(text)["traceEvents"], phases, acting)]
    if added:
        begin = _EVENTS.search(text)
        assert begin is not None  # they are where these are from
        # To write millions of torch's events anew takes longer than all else.
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
            file.writelines((text[: begin.end()], ",\n".join(added), ",", text[begin.end() :]))


def _tracks(
    events: list[dict[str, Any]], phases: Collection[str], acting: Mapping[str, list[str]]
) -> Iterator[dict[str, Any]]:
    of_modules = {with_techniques(site, acting): (site, techniques) for site, techniques in acting.items() if site}
    order = [STEPS, PHASES, *sorted({technique for techniques in acting.values() for technique in techniques})]
    process = 1 + max((event["pid"] for event in events if isinstance(event.get("pid"), int)), default=0)
    threads: dict[tuple[str, Any], int] = {}
    for event in events:
        if event.get("cat") != "user_annotation" or event.get("ph") != "X":
            continue
        name = event["name"]
        if _STEP.match(name):
            step = name.partition(" [")[0]
            shown = [(STEPS, step), *((technique, step) for technique in acting.get("", ()))]
        elif name in phases:
            shown = [(PHASES, name)]
        else:
            site, techniques = of_modules.get(name, ("", []))
            shown = [(technique, site) for technique in techniques]
        for track, called in shown:
            thread = threads.setdefault((track, event["tid"]), len(threads) + 1)
            yield {**event, "cat": PROCESS, "name": called, "pid": process, "tid": thread, "args": {}}
    if threads:
        yield _about("process_name", process, 0, name=PROCESS)
        yield _about("process_sort_index", process, 0, sort_index=-1)  # above all others
    for (track, _), thread in threads.items():
        yield _about("thread_name", process, thread, name=track)
        yield _about("thread_sort_index", process, thread, sort_index=order.index(track))


def _about(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}
