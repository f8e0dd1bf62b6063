"""``lightning-accel run train.py …``: starts a program with the fastest allocator on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

from lightning_accel.core.allocators import (
    ENVIRONMENT_IN_FILE,
    EXPANDABLE_SEGMENTS,
    PACKAGES,
    Allocator,
    can_expand_segments,
    heaps,
    installed_library,
    segment_settings,
)
from lightning_accel.core.checks import nearest
from lightning_accel.core.heap import heap_settings
from lightning_accel.core.package_version import own_version
from lightning_accel.core.processor import from_cpuinfo
from lightning_accel.experiment.digest import digest
from lightning_accel.experiment.store import DamagedError, Store

SECONDS = 20.0
"""How long comparisons may take on a machine without earlier results."""

USAGE = """\
usage: lightning-accel run [--measure] train.py [argument ...]
       lightning-accel run [--measure] -m package.module [argument ...]
       lightning-accel run --measure

Starts a Python program with the allocator that wins here: variables that have to be there before Python starts. What
`tune` has found for the program is in the configuration that it wrote, and holds where the program is given that.
Otherwise, on a GPU, segments of its memory expand; on a CPU, a stand-in for a training is measured once under each
allocator of this machine, in about half a minute, and remembered. Variables that you have set stay as they are.

  --measure   measure anew
  -h, --help  show this
"""

# Set by torchrun, Open MPI, MPICH and Slurm.
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclass(frozen=True)
class Start:
    """How a program is started."""

    environment: Mapping[str, str]  # variables to add
    reason: str  # why these, or why none
    table: Sequence[str] = field(default=())  # one line for each allocator just measured


_STARTS = Store("allocators", lambda found: Start(**found))


def run(given: Sequence[str]) -> int:
    """Replaces this process with the program. If that is impossible, waits for it and returns its status."""
    arguments = list(given)
    measures = arguments[:1] == ["--measure"]
    if measures:
        arguments.pop(0)
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if (arguments or not measures) and (complaint := complaint_about(arguments)):
        print(f"{USAGE}\nlightning-accel run: error: {complaint}", file=sys.stderr)
        raise SystemExit(2)
    try:
        start = start_for(arguments, os.environ, measures=measures)
    except KeyboardInterrupt:
        return 130  # the status of a program ended by Ctrl-C
    rank = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")
    if not rank.isdigit() or int(rank) == 0:
        for line in (*start.table, start.reason):
            print(f"lightning-accel run: {line}", file=sys.stderr)
    if not arguments:
        return 0
    command, environment = [sys.executable, *arguments], {**os.environ, **start.environment}
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform == "win32":  # execve() would return to the prompt at once
        return subprocess.call(command, env=environment)
    os.execve(sys.executable, command, environment)


def start_for(arguments: Sequence[str], environment: Mapping[str, str], *, measures: bool) -> Start:
    """Returns the variables with which to start a program, and why. If it ``measures``, ignores earlier results."""
    found = _of_tune(arguments)
    if found is not None:
        path, variables = found
        if own := {name: environment[name] for name in variables if environment.get(name)}:
            return Start({}, f"{_in_words(own)} is yours, and stays; {path} has {_in_words(variables)}")
        return Start(variables, f"{_in_words(variables)}, by {path}")
    if _has_nvidia_gpu(environment):
        if own := segment_settings(environment):
            return Start({}, f"{_in_words(own)} is yours, and stays")
        if not can_expand_segments():
            return Start({}, "nothing to gain: torch cannot expand segments of CUDA memory on this system")
        words = _in_words(EXPANDABLE_SEGMENTS)
        return Start(EXPANDABLE_SEGMENTS, f"{words}: fewer gaps in a GPU's memory, and the same numbers")
    if own := heap_settings(environment):
        return Start({}, f"{_in_words(own)} is yours, and stays")
    return _with_heap(measures=measures)


def complaint_about(arguments: Sequence[str]) -> str:
    """Returns what is wrong with a program and its arguments; empty if nothing is found in advance."""
    program = arguments[0] if arguments else ""
    if not program:
        return "which program? Give a file, or -m and a module."
    if program == "-m":
        package = arguments[1].partition(".")[0] if len(arguments) > 1 else ""
        if not package:
            return "-m: which module?"
        is_here = any((Path.cwd() / name).exists() for name in (package, f"{package}.py"))
        if not is_here and importlib.util.find_spec(package) is None:
            return f"there is no module {package!r} in {Path.cwd()}, nor among those that are installed"
        return ""
    if program.startswith("-"):
        return f"{program!r} is no option of this command. Options of the program stand behind it."
    if not Path(program).exists():
        parent = Path(program).parent
        known = [str(path) for path in parent.glob("*.py")] if parent.is_dir() else []
        return f"there is no file {program!r} in {Path.cwd()}{nearest(program, known)}"
    return ""


def _of_tune(arguments: Sequence[str]) -> tuple[str, dict[str, str]] | None:
    """Returns the last configuration among the arguments that asks for variables, and the variables; None if none."""
    for argument in reversed(arguments):
        name = argument.rpartition("=")[2]
        if not name.endswith((".yaml", ".yml")) or not Path(name).is_file():
            continue
        with suppress(OSError, ValueError):  # the program reports what is wrong with it
            for line in Path(name).read_text(encoding="utf-8").splitlines():
                if not line.startswith(f"# {ENVIRONMENT_IN_FILE}"):
                    continue
                variables: dict[str, str] = json.loads(line.partition(ENVIRONMENT_IN_FILE)[2])
                library = variables.get("LD_PRELOAD")
                here = {installed_library(one) for one in PACKAGES}
                if library is None or library in here or Path(library).exists():
                    return name, variables
                print(f"lightning-accel run: {name} asks for {library}, which is not on this machine.", file=sys.stderr)
    return None


def _with_heap(*, measures: bool) -> Start:
    possible = heaps()
    if not possible:
        return Start({}, f"nothing to gain: on {platform.system()} there is no other allocator to start a program with")
    key = _key(possible)
    with suppress(DamagedError):  # measured and written again
        if not measures and (entry := _STARTS.get(key)) is not None:
            return entry.value
    if any(os.environ.get(name, "1") not in ("", "1") for name in _SIZES):
        return Start({}, "not measured yet, which several processes do not do: first `lightning-accel run --measure`")
    names = ", ".join(heap.name for heap in possible)
    print(f"lightning-accel run: measures a stand-in once under {names}: about half a minute", file=sys.stderr)
    from lightning_accel.search.heap_trial import try_heaps  # late: what is remembered needs no NumPy

    try:
        result = try_heaps(possible, SECONDS)
    except OSError as error:
        return Start({}, f"nothing could be measured: {error}")
    measured = f"measured on a stand-in for a training, {date.today()}"
    reason = f"{result.name}, {measured}"
    if not result.name:
        reason = f"nothing to gain: no allocator is faster, {measured}"
    if not result.name and not result.is_sure:
        reason = f"nothing that could be told, {measured}; on a machine that is quiet: `lightning-accel run --measure`"
    with suppress(OSError):  # results that cannot be stored are measured again
        _STARTS.put(key, {"environment": dict(result.environment), "reason": reason})
    return Start(result.environment, reason, result.table)


def _key(possible: Sequence[Allocator]) -> dict[str, str]:
    about = (
        *(from_cpuinfo("model name"), os.cpu_count(), os.environ.get("OMP_NUM_THREADS")),
        *(platform.python_version(), version("torch"), own_version(), platform.libc_ver()),
        *((heap.name, dict(heap.environment)) for heap in possible),
    )
    return {"host": platform.node(), "machine": digest(*about)}


def _has_nvidia_gpu(environment: Mapping[str, str]) -> bool:
    """Returns whether a program can see an NVIDIA GPU. Does not use torch, whose import takes seconds."""
    is_hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not is_hidden and (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists())


def _in_words(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())
