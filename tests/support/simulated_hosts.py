"""Machines that are not at hand, as values: what a run would decide on them can be read, and tested, on any other."""

from __future__ import annotations

from torch import nn

from lightning_accel.cli.decisions import forecasts
from lightning_accel.core.host import Host
from lightning_accel.settings import Plan
from lightning_accel.techniques.registry import declarations
from lightning_accel.techniques.technique_context import Forecast
from support.shown_values import shown_values

SIMULATED_HOSTS: dict[str, Host] = {
    "A100": Host(kind="cuda", device_name="NVIDIA A100", capability=(8, 0), native_bf16=True, compiler="triton"),
    "H200 with flash-attn and FlashAttention 3": Host(
        kind="cuda",
        device_name="NVIDIA H200",
        capability=(9, 0),
        native_bf16=True,
        compiler="triton",
        kernels=frozenset({"flash-attn", "fa3"}),
    ),
    "T4": Host(kind="cuda", device_name="Tesla T4", capability=(7, 5), compiler="triton"),
    "MI300X": Host(kind="rocm", device_name="AMD Instinct MI300X", arch="gfx942", native_bf16=True, compiler="triton"),
    "RX 7900": Host(
        kind="rocm", device_name="AMD Radeon RX 7900 XTX", arch="gfx1100", native_bf16=True, compiler="triton"
    ),
    "TPU v5": Host(kind="xla", device_name="TPU v5", native_bf16=True),
    "M3": Host(kind="mps", device_name="Apple M3"),
    "AVX2 CPU": Host(kind="cpu", device_name="a CPU with AVX2", compiler="g++"),
    "AMX CPU": Host(kind="cpu", device_name="a CPU with AMX", native_bf16=True, compiler="g++"),
}
"""Name → host. Each has what such a machine usually has: a compiler, and no attention packages that are not named."""


def when_asked(host: Host, model: nn.Module) -> dict[str, Forecast]:
    """What every setting that is not on by default comes to when it is asked for by itself."""
    nothing = {name: one.off for name, one in declarations().items()}
    asked = [{**nothing, name: value} for name, one in declarations().items() for value in shown_values(one)]
    return {setting: said for one in asked for setting, said in forecasts(Plan().replace(**one), host, model).items()}
