"""Facts about this machine: the device of a run, its fast dtypes, kernels and compilers. Detected once per run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_accel.core.processor import from_cpuinfo
from lightning_accel.core.torch_private.compilation import cpp_compilers
from lightning_accel.core.torch_private.other_libraries import tpu_library

HostKind = Literal["cuda", "rocm", "xla", "mps", "cpu"]

# AMD's architectures with matrix instructions for bfloat16: CDNA from MI100 on, RDNA from 3 on. Torch reports
# bfloat16 for every AMD card. https://rocm.docs.amd.com/en/latest/reference/precision-support.html
_BF16_ARCHITECTURES = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")

SLOW_BF16 = "this CPU has neither AMX nor a fast AVX512-BF16 that torch may use: bfloat16 would be slower than float32"

# https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
_ONEDNN_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")

# The widest first, by their names in torch.cpu.get_capabilities().
_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512_f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}


@dataclass(frozen=True, kw_only=True)
class Host:
    """The facts about a machine on which techniques base their decisions.

    A plain value: create one by hand to see what a run would do on another machine.

    Attributes:
        kind: The family of device the run computes on. AMD cards are ``"rocm"`` although torch calls them ``cuda``.
        device_name: The device's name as its vendor writes it.
        capability: CUDA compute capability ``(major, minor)``; None for all other kinds.
        arch: An AMD card's architecture: ``"gfx942"``; empty for all other kinds.
        instructions: The widest vector instructions of an x86 CPU: ``"AVX2"``, ``"AVX512-BF16"``. The CPU's name does
            not tell them. Empty for all other kinds.
        native_bf16: Whether hardware (matrix units, AMX, AVX512-BF16) computes in bfloat16, faster than in float32.
        compiler: What TorchInductor would build kernels with (``"triton"`` or a C++ compiler); None if there is none.
        kernels: Attention kernels installed besides torch's own, by the names that ``flash_attention`` accepts:
            ``"flash-attn"``, ``"fa3"``, ``"fa4"``.
    """

    kind: HostKind
    device_name: str
    capability: tuple[int, int] | None = None
    arch: str = ""
    instructions: str = ""
    native_bf16: bool = False
    compiler: str | None = None
    kernels: frozenset[str] = frozenset()

    @classmethod
    def detect(cls, device: torch.device | str | None = None) -> Host:
        """Detects the facts about ``device``, by default the device of Lightning's ``accelerator="auto"``."""
        device = torch.device(device if device is not None else _default_device_type())
        if device.type == "cuda":
            return cls._detect_cuda(device)
        if device.type == "mps":
            has_name = torch.backends.mps.is_available()
            return cls(kind="mps", device_name=torch.backends.mps.get_name() if has_name else "MPS")
        if device.type == "xla":
            tpu = _tpu_name()
            return cls(kind="xla", device_name=tpu or "XLA", native_bf16=tpu is not None)
        cpu = _cpu_capabilities()
        device_name = _cpu_name() or str(cpu.get("cpu_name") or platform.machine())
        return cls(
            kind="cpu",
            device_name=device_name,
            instructions=next((name for key, name in _INSTRUCTIONS.items() if cpu.get(key)), ""),
            native_bf16=_is_faster_in_bf16(device_name, cpu),
            compiler=next(filter(shutil.which, cpp_compilers()), None),
        )

    @classmethod
    def _detect_cuda(cls, device: torch.device) -> Host:
        # Triton builds a small launcher in C for every kernel.
        has_triton = importlib.util.find_spec("triton") and any(map(shutil.which, ("cc", "gcc", "clang")))
        made = functools.partial(
            cls,
            device_name=torch.cuda.get_device_name(device),
            compiler="triton" if has_triton else None,
            kernels=_installed_kernels(),
        )
        if torch.version.hip is None:
            capability = torch.cuda.get_device_capability(device)
            return made(kind="cuda", capability=capability, native_bf16=capability >= (8, 0))
        # Build features may follow a colon: gfx90a:sramecc+:xnack-
        arch = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return made(kind="rocm", arch=arch, native_bf16=arch.startswith(_BF16_ARCHITECTURES))

    @property
    def described(self) -> str:
        """Device name, instructions and kind, for users: ``"AMD EPYC, AVX2 (cpu)"``."""
        return f"{', '.join(filter(None, (self.device_name, self.instructions)))} ({self.kind})"

    @property
    def device_type(self) -> str:
        """The device type as torch spells it (``"cuda"`` for AMD cards too)."""
        return "cuda" if self.kind == "rocm" else self.kind


def usable_cores() -> int:
    """Returns how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_device_type() -> str:
    # In Lightning's order and with Lightning's checks.
    if _ask_tpus("num_available_devices"):
        return "xla"
    is_disabled = os.environ.get("DISABLE_MPS", "0") == "1"  # Lightning's switch for opting out
    if not is_disabled and torch.backends.mps.is_available() and platform.processor() in ("arm", "arm64"):
        return "mps"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _tpu_name() -> str | None:
    """Returns a name such as ``"TPU v5"``; None if XLA computes on another device or is not installed."""
    try:
        if importlib.import_module("torch_xla.runtime").device_type() != "TPU":
            return None
    except Exception:  # as in _ask_tpus()
        return None
    version = _ask_tpus("version")  # a network request, which may fail
    return "TPU" if version is None else f"TPU v{version}"


def _ask_tpus(question: str) -> Any:
    try:
        return getattr(tpu_library(), question)()
    except Exception:  # not installed, built for another torch or not configured: no TPU
        return None


def _installed_kernels() -> frozenset[str]:
    """Returns which :attr:`Host.kernels` are installed. Imports nothing: flash-attn would load its library."""
    found = {"fa3"} if importlib.util.find_spec("flash_attn_interface") else set()
    package = importlib.util.find_spec("flash_attn")
    if package is not None:
        # FlashAttention 4 installs only its subfolder, without an __init__ of the package.
        found |= {"flash-attn"} if package.origin is not None else set()
        folders = package.submodule_search_locations or ()
        found |= {"fa4"} if any(Path(folder, "cute").is_dir() for folder in folders) else set()
    return frozenset(found)


def _cpu_capabilities() -> dict[str, Any]:
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    # torch 2.11 has no public function for this. Linux knows the flags; on other systems nothing is known.
    flags = (from_cpuinfo("flags") or "").split()
    return {flag.replace("avx512f", "avx512_f"): True for flag in flags}


def _is_faster_in_bf16(name: str, cpu: dict[str, Any]) -> bool:
    # Only oneDNN has kernels for it. Without them a product takes a hundred times as long.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    onednn: Any = torch.backends.mkldnn
    if limit.upper() in _ONEDNN_WITHOUT_BF16 or not (onednn.is_available() and onednn.enabled):
        return False
    # Intel's CPUs with AVX512-FP16 have AMX for it, which some virtual machines hide. AVX512-BF16 alone is slower there
    # than float32: oneDNN 3.12, claim 2 in docs/claims.md.
    lacks_amx = "Intel" in name and cpu.get("avx512_fp16")
    return bool(cpu.get("amx_bf16") or (cpu.get("avx512_bf16") and not lacks_amx))


@functools.cache
def _cpu_name() -> str | None:
    return from_cpuinfo("model name") or platform.processor() or None
