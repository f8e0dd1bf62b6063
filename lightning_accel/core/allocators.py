"""Memory allocators that can be chosen when a process starts, and the environment variables that choose them."""

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
"""Library → its package on Debian and Ubuntu. PyPI has no package for either."""

_SPELLINGS = {JEMALLOC: ("jemalloc",), TCMALLOC: ("tcmalloc_minimal", "tcmalloc")}

EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Makes torch's CUDA allocator grow its segments. Torch reads the variable when CUDA starts."""

ENVIRONMENT_IN_FILE = "environment: "
"""Prefix of the comment that lists environment variables in the configuration written by ``tune``."""

_CUDA_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

# By default jemalloc returns free memory after ten seconds, even if the next step needs that memory again.
_KEEPS_FREE_MEMORY = {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"}


@dataclass(frozen=True)
class Allocator:
    """An allocator that a process can be started with."""

    name: str  # shown to users
    environment: Mapping[str, str]  # the variables that choose it


@functools.cache  # find_library() starts subprocesses
def installed_library(name: str) -> str | None:
    """Returns a shared library as the loader finds it, or from this Python's ``lib`` (conda); None if missing."""
    for spelling in _SPELLINGS[name]:
        if (found := ctypes.util.find_library(spelling)) is not None:
            return found
        for path in sorted(Path(sys.prefix, "lib").glob(f"lib{spelling}.so*")):
            return str(path)
    return None


def heaps() -> list[Allocator]:
    """Returns the heap allocators available here besides the default; an empty list outside Linux."""
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
    """Returns the environment variables with which the user configures torch's device allocator."""
    return {name: environment[name] for name in _CUDA_VARIABLES if environment.get(name)}


def can_expand_segments() -> bool:
    """Returns whether torch can use expandable segments here: on Linux, but not under WSL."""
    return sys.platform == "linux" and "microsoft" not in platform.release().lower()
