"""Named ranges in a trace: the parts of a step, and modules by their names with what techniques do there.

Steps, their phases and each technique also have tracks of their own, which a viewer shows before threads.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from typing_extensions import override

from lightning_accel.core.compiled import RUNS_EAGERLY
from lightning_accel.core.patch import Patch
from lightning_accel.core.report import Report
from lightning_accel.core.torch_private.compilation import compiled_call, set_compiled_call
from lightning_accel.core.torch_private.modules import eager_call


class Ranges(threading.local):
    """Ranges by :func:`torch.profiler.record_function`, and by NVTX for nsys; each thread has its own."""

    def __init__(self, *, has_nvtx: bool) -> None:
        self._has_nvtx = has_nvtx
        self._open: list[AbstractContextManager[None]] = []

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        with record_function(name):
            if self._has_nvtx:
                torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                if self._has_nvtx:
                    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def enter(self, name: str) -> None:
        """Begins one, to be left."""
        entered = self.named(name)
        entered.__enter__()
        self._open.append(entered)

    def leave(self) -> None:
        """Ends the one that was entered last; without effect where there is none."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def close(self) -> None:
        while self._open:
            self.leave()


class ModuleRanges(Patch):
    """Names the modules of a model in a trace: those that hold others, and those with weights.

    They are not hooked, nor is a forward rebound: techniques look at both. What calls a module is told instead, where
    ``module.compile()`` puts its compiled form: outside of what is compiled, captured, replayed or counted. What holds
    no weights and no modules, as activations do not, is left alone: whether such a one may work in place is counted
    in references, to its caller's frame among them.

    ``acting`` has of each site the techniques that act there, for its name.
    """

    def __init__(self, model: nn.Module, ranges: Ranges, acting: Mapping[str, list[str]]) -> None:
        super().__init__("modules", "named in a trace")
        self._model, self._ranges, self._acting = model, ranges, acting
        self._named: list[tuple[nn.Module, Callable[..., Any], Callable[..., Any] | None]] = []

    @override
    def _apply(self) -> None:
        for site, module in self._model.named_modules():
            if site and _is_worth_a_name(module):
                before = compiled_call(module)
                call = self._naming(with_techniques(site, self._acting), before or eager_call(module))
                if before is None:
                    setattr(call, RUNS_EAGERLY, True)
                set_compiled_call(module, call)
                self._named.append((module, call, before))

    @override
    def _undo(self) -> None:
        for module, call, before in self._named:
            if compiled_call(module) is call:  # else somebody has compiled it since
                set_compiled_call(module, before)
        self._named = []

    def _naming(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def named_call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_applied:  # somebody has kept it
                return call(*args, **kwargs)
            with self._ranges.named(name):
                return call(*args, **kwargs)

        return named_call


def _is_worth_a_name(module: nn.Module) -> bool:
    # What torch.compile() returns passes on what is set on it.
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        return False
    return next(module.children(), None) is not None or next(module.parameters(recurse=False), None) is not None


def techniques_by_site(report: Report | None) -> dict[str, list[str]]:
    """The techniques that act at each site; at site ``""`` those that act on whole steps."""
    found: dict[str, list[str]] = {}
    for name, record in ({} if report is None else report.techniques).items():
        if record.acts:
            for site in record.changes or [""]:
                found.setdefault(site, []).append(name)
    return found


def with_techniques(name: str, acting: Mapping[str, list[str]], site: str | None = None) -> str:
    """``encoder.layers.0 [gradient_checkpointing]``."""
    techniques = acting.get(name if site is None else site)
    return f"{name} [{', '.join(techniques)}]" if techniques else name


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
