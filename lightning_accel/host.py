"""What one machine has: the device a run uses, its fast dtypes, its compilers. Asked once per run."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from typing import Any, Literal

import torch

HostKind = Literal["cuda", "rocm", "xla", "mps", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """The facts about a machine that the techniques decide by.

    A plain value: build one by hand to see what a run would do on a machine that is not at hand.

    Attributes:
        kind: The family of device the run computes on. AMD cards are ``"rocm"`` although torch calls them ``cuda``.
        device_name: The device's name as its vendor writes it.
        capability: CUDA compute capability ``(major, minor)``; None on every other kind.
        native_bf16: Whether matrix units (or AVX512-BF16, AMX) compute in bfloat16, rather than emulate it.
        compiler: What TorchInductor would build kernels with (``"triton"`` or a C++ compiler); None when there is none.
    """

    kind: HostKind
    device_name: str
    capability: tuple[int, int] | None = None
    native_bf16: bool = False
    compiler: str | None = None

    @classmethod
    def detect(cls, device: torch.device | str | None = None) -> Host:
        """Asks torch about ``device``, by default the one that Lightning's ``accelerator="auto"`` would take."""
        device_type = torch.device(device).type if device is not None else _default_device_type()
        if device_type == "cuda":
            return cls._detect_cuda(torch.device(device if device is not None else "cuda"))
        if device_type in ("mps", "xla"):
            return cls(kind="mps" if device_type == "mps" else "xla", device_name=device_type.upper())
        cpu = _cpu_capabilities()
        return cls(
            kind="cpu",
            device_name=_cpu_name() or str(cpu.get("cpu_name") or platform.machine()),
            native_bf16=bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16")),
            compiler=_cpp_compiler(),
        )

    @classmethod
    def _detect_cuda(cls, device: torch.device) -> Host:
        is_rocm = torch.version.hip is not None
        return cls(
            kind="rocm" if is_rocm else "cuda",
            device_name=torch.cuda.get_device_name(device),
            capability=None if is_rocm else torch.cuda.get_device_capability(device),
            native_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            compiler="triton" if importlib.util.find_spec("triton") and _c_compiler() else None,
        )

    @property
    def device_type(self) -> str:
        """The device type as torch spells it (``"cuda"`` for AMD cards too)."""
        return "cuda" if self.kind == "rocm" else self.kind


def usable_cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_device_type() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _cpu_capabilities() -> dict[str, Any]:
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    # torch 2.11 has only the single questions.
    return {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx_bf16": torch.cpu._is_amx_tile_supported(),
    }


def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            names = (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
            return next(names, None)
    except OSError:
        return platform.processor() or None


def _cpp_compiler() -> str | None:
    from torch._inductor import config

    # The same search list as TorchInductor's: its own lookup raises, and pulls in its whole code generator.
    configured = config.cpp.cxx
    names = configured if isinstance(configured, list | tuple) else (configured,)
    return next((name for name in names if name and shutil.which(name)), None)


def _c_compiler() -> str | None:
    # Triton builds a small launcher in C for every kernel.
    return next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
