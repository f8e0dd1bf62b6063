"""Allocators that a process can be started with: which of them this machine has, and the variables that choose them."""

from __future__ import annotations

import ctypes.util
import functools
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_accel.core.heap import GLIBC, JEMALLOC, KEPT_ENVIRONMENT, TCMALLOC

PACKAGES = {JEMALLOC: "libjemalloc2", TCMALLOC: "libtcmalloc-minimal4"}
"""Library → what Debian and Ubuntu call it. No package on PyPI brings one."""

_SPELLINGS = {JEMALLOC: ("jemalloc",), TCMALLOC: ("tcmalloc_minimal", "tcmalloc")}

EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Has torch's allocator of CUDA memory grow its segments. It is read when CUDA starts."""

ENVIRONMENT_IN_FILE = "environment: "
"""How the comment begins by which ``tune`` tells of variables, in the configuration that it writes."""

_CUDA_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

# By default it gives free memory back after ten seconds, in the middle of steps that will ask for it again.
_KEEPS_FREE_MEMORY = {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"}


@dataclass(frozen=True)
class Allocator:
    """One to start a process with."""

    name: str  # for people
    environment: Mapping[str, str]  # the variables that choose it


@functools.cache  # the loader is asked through processes of its own
def installed_library(name: str) -> str | None:
    """The file of a shared library, as the loader finds it, or beside this Python, as conda installs it."""
    for spelling in _SPELLINGS[name]:
        if (found := ctypes.util.find_library(spelling)) is not None:
            return found
        for path in sorted(Path(sys.prefix, "lib").glob(f"lib{spelling}.so*")):
            return str(path)
    return None


def heaps() -> list[Allocator]:
    """Those that could keep a program's heap here, beside what it has by itself; none where that is not Linux."""
    if sys.platform != "linux":
        return []
    found = []
    if platform.libc_ver()[0] == GLIBC:
        found.append(Allocator("glibc that keeps free memory", KEPT_ENVIRONMENT))
    if library := installed_library(JEMALLOC):
        found.append(Allocator(JEMALLOC, {"LD_PRELOAD": library, **_KEEPS_FREE_MEMORY}))
    if library := installed_library(TCMALLOC):
        found.append(Allocator(TCMALLOC, {"LD_PRELOAD": library}))
    return found


def segment_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables by which the user has set up torch's allocator of device memory."""
    return {name: environment[name] for name in _CUDA_VARIABLES if environment.get(name)}


def can_expand_segments() -> bool:
    """Whether CUDA memory can be mapped piece by piece here: torch does so on Linux, and not under WSL."""
    return sys.platform == "linux" and "microsoft" not in platform.release().lower()
