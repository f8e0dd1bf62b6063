"""The machine that figures belong to: what it is, how it is called in a table, and in the name of a file."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

from lightning_accel.core.host import Host

# What vendors and hypervisors write into a name that tells no machine from another.
_NOISE = re.compile(r"\((R|TM|C)\)|@.*|\b(CPU|Processor|\d+-Core)\b", re.IGNORECASE)


def machine(host: Host | None = None) -> dict[str, Any]:
    """This machine, and the versions that run on it.

    Args:
        host: By default what a run would take.
    """
    host = host or Host.detect()
    return {
        "device": host.device_name,
        "kind": host.kind,
        "instructions": host.instructions,
        "native_bf16": host.native_bf16,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def title(about: Mapping[str, Any]) -> str:
    """Of a column: ``"AMD EPYC, AVX2, 2 cores, no bfloat16 in hardware"``."""
    parts = [about["device"], about["instructions"]]
    parts += [f"{about['cores']} cores"] if about["kind"] == "cpu" else []
    lacks = "slower in bfloat16" if "BF16" in about["instructions"] else "no bfloat16 in hardware"
    parts += ["bfloat16 in hardware" if about["native_bf16"] else lacks]
    return ", ".join(part for part in parts if part)


def slug(about: Mapping[str, Any]) -> str:
    """Of a file, the same whenever the same kind of machine measures: ``"amd-epyc-avx2-2-cores"``.

    The clock is left out, which hypervisors give or do not, and so are versions: a machine's newer figures replace
    its older ones.
    """
    parts = [_NOISE.sub(" ", about["device"]), about["instructions"]]
    parts += [f"{about['cores']} cores"] if about["kind"] == "cpu" else []
    return re.sub("[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")
