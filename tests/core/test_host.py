"""A host says what a machine has, or what a machine that is not at hand would have."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from lightning_accel.core import host as host_module
from lightning_accel.core.host import Host, HostKind


def test_this_machine_is_described() -> None:
    host = Host.detect("cpu")
    assert (host.kind, host.device_type) == ("cpu", "cpu")
    assert host.device_name
    assert host.capability is None


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_device_may_be_given_by_name_or_object(device: str | torch.device) -> None:
    assert Host.detect(device) == Host.detect("cpu")


def test_without_a_device_it_is_what_lightning_would_take() -> None:
    assert Host.detect().device_type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", ["mps", "xla"])
def test_machines_it_cannot_ask_are_named_and_promise_nothing(device: str) -> None:
    host = Host.detect(device)
    assert (host.kind, host.native_bf16, host.compiler) == (device, False, None)


@pytest.mark.parametrize(
    ("name", "capabilities", "is_native"),
    [
        ("AMD EPYC", {"avx512_bf16": True}, True),
        ("AMD EPYC", {"avx512_bf16": True, "avx512_fp16": True}, True),
        ("Intel Xeon", {"avx512_bf16": True}, True),
        ("Intel Xeon", {"avx512_bf16": True, "avx512_fp16": True}, False),
        ("Intel Xeon", {"avx512_bf16": True, "avx512_fp16": True, "amx_bf16": True}, True),
        ("Intel Xeon", {"amx_bf16": True, "avx512_bf16": False}, True),
        ("AMD EPYC", {"avx2": True}, False),
        ("", {}, False),
    ],
)
def test_bfloat16_is_native_with_amx_or_avx512_bf16_but_not_where_a_virtual_machine_hides_amx(
    monkeypatch: pytest.MonkeyPatch, name: str, capabilities: dict[str, bool], is_native: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(host_module, "_cpu_name", lambda: name)
    with mock.patch.dict(os.environ, ONEDNN_MAX_CPU_ISA=""):
        assert Host.detect("cpu").native_bf16 is is_native


@pytest.mark.parametrize(("limit", "is_native"), [("avx2", False), ("AVX512_CORE", False), ("AVX512_CORE_AMX", True)])
def test_bfloat16_is_not_native_where_onednn_must_do_with_less_than_the_processor_has(
    monkeypatch: pytest.MonkeyPatch, limit: str, is_native: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    with mock.patch.dict(os.environ, ONEDNN_MAX_CPU_ISA=limit):
        assert Host.detect("cpu").native_bf16 is is_native


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # torch, of its own flags
def test_bfloat16_is_not_native_where_onednn_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not Host.detect("cpu").native_bf16


@pytest.mark.parametrize(
    ("capabilities", "instructions"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_bf16": True, "amx_bf16": True}, "AMX"),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": True}, "AVX512-BF16"),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False}, "AVX-512"),
        ({"avx2": True}, "AVX2"),
        ({}, ""),
    ],
)
def test_a_cpu_is_told_from_others_of_its_name_by_its_widest_instructions(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], instructions: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    host = Host.detect("cpu")
    assert host.instructions == instructions
    assert host.described == f"{host.device_name}{instructions and ', '}{instructions} (cpu)"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="asks Linux")
def test_torch_2_11_cannot_tell_what_the_processor_has_and_the_system_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_torch = Host.detect("cpu")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert Host.detect("cpu") == by_torch


def test_linux_tells_the_widest_instructions_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = "model name\t: A Xeon\nflags\t\t: fpu avx avx2 avx512f avx512_bf16\n\nmodel name\t: Another\n"
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(Path, "read_text", lambda self, **_: cpuinfo)
    monkeypatch.setattr(host_module, "_cpu_name", host_module._cpu_name.__wrapped__)  # which is asked once a process
    with mock.patch.dict(os.environ, ONEDNN_MAX_CPU_ISA=""):
        host = Host.detect("cpu")
    assert (host.device_name, host.instructions, host.native_bf16) == ("A Xeon", "AVX512-BF16", True)


def test_no_compiler_on_the_path_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert Host.detect("cpu").compiler is None


def test_amd_cards_are_rocm_although_torch_calls_them_cuda() -> None:
    host = Host(kind="rocm", device_name="MI300")
    assert host.device_type == "cuda"


@pytest.mark.parametrize(
    ("is_rocm", "kind", "capability"), [(False, "cuda", (7, 5)), (True, "rocm", None)], ids=["nvidia", "amd"]
)
def test_a_gpu_is_described_by_what_torch_says(
    monkeypatch: pytest.MonkeyPatch, is_rocm: bool, kind: str, capability: tuple[int, int] | None
) -> None:
    simulate_gpu(monkeypatch, arch="gfx1030" if is_rocm else "")
    host = Host.detect("cuda:0")
    assert (host.kind, host.device_name, host.capability, host.native_bf16) == (kind, "a card", capability, False)


def simulate_gpu(monkeypatch: pytest.MonkeyPatch, arch: str = "") -> None:
    """A card that torch sees: AMD's with an architecture, else NVIDIA's, of compute capability 7.5."""
    monkeypatch.setattr(torch.version, "hip", "6.0" if arch else None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))


@pytest.mark.parametrize(
    ("reported", "arch", "native_bf16"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942", True),  # MI300X
        ("gfx90a:sramecc+:xnack-", "gfx90a", True),  # MI200
        ("gfx1100", "gfx1100", True),  # RX 7900
        ("gfx1201", "gfx1201", True),  # RX 9070
        ("gfx1030", "gfx1030", False),  # RX 6900
        ("gfx906:sramecc+:xnack-", "gfx906", False),  # MI50
    ],
)
def test_of_an_amd_card_the_architecture_tells_whether_bfloat16_is_native(
    monkeypatch: pytest.MonkeyPatch, reported: str, arch: str, native_bf16: bool
) -> None:
    simulate_gpu(monkeypatch, arch=reported)
    host = Host.detect("cuda")
    assert (host.arch, host.native_bf16) == (arch, native_bf16)


@pytest.mark.parametrize(
    ("files", "kernels"),
    [
        ([], set()),
        (["flash_attn/__init__.py"], {"flash-attn"}),
        (["flash_attn/__init__.py", "flash_attn/cute/__init__.py"], {"flash-attn", "fa4"}),
        (["flash_attn/cute/__init__.py"], {"fa4"}),  # FlashAttention 4 by itself makes a namespace of the package
        (["flash_attn_interface.py"], {"fa3"}),
    ],
)
def test_installed_attention_kernels_are_found_without_being_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], kernels: set[str]
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("raise ImportError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    simulate_gpu(monkeypatch)
    assert Host.detect("cuda").kernels == kernels


# -- XLA, simulated ------------------------------------------------------------------------------------------------


@pytest.fixture
def simulate_xla(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a torch_xla into place whose answers are given; what is None raises as torch_xla does where it fails."""

    def simulate(device_type: str = "TPU", *, tpus: int | None = 4, version: int | None = 5) -> None:
        def answer(value: object) -> Callable[[], object]:
            def give() -> object:
                if value is None:
                    raise OSError("no metadata server")
                return value

            return give

        runtime, tpu = ModuleType("torch_xla.runtime"), ModuleType("torch_xla._internal.tpu")
        vars(runtime).update(device_type=answer(device_type))
        vars(tpu).update(num_available_devices=answer(tpus), version=answer(version))
        for name in ("torch_xla", "torch_xla._internal"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
        monkeypatch.setitem(sys.modules, tpu.__name__, tpu)

    return simulate


def test_a_tpu_is_named_and_computes_in_bfloat16(simulate_xla: Callable[..., None]) -> None:
    simulate_xla()
    assert Host.detect("xla") == Host.detect() == Host(kind="xla", device_name="TPU v5", native_bf16=True)


def test_a_tpu_of_unknown_version_is_a_tpu(simulate_xla: Callable[..., None]) -> None:
    simulate_xla(version=None)
    assert Host.detect("xla") == Host(kind="xla", device_name="TPU", native_bf16=True)


def test_xla_on_something_else_promises_nothing(simulate_xla: Callable[..., None]) -> None:
    simulate_xla("CPU", tpus=0)
    assert Host.detect("xla") == Host(kind="xla", device_name="XLA")
    assert Host.detect().kind != "xla"


def test_an_xla_that_cannot_answer_is_none(simulate_xla: Callable[..., None]) -> None:
    simulate_xla(tpus=None)
    assert Host.detect().kind != "xla"


# -- the default ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _lightning_asks_again() -> Iterator[None]:
    """Lightning remembers whether there is an Apple GPU."""
    from lightning.fabric.accelerators.mps import MPSAccelerator

    MPSAccelerator.is_available.cache_clear()
    yield
    MPSAccelerator.is_available.cache_clear()


@pytest.mark.usefixtures("_lightning_asks_again")
@pytest.mark.parametrize(
    ("has_tpu", "has_mps", "has_cuda", "kind"),
    [
        (True, True, True, "xla"),
        (False, True, True, "mps"),
        (False, False, True, "cuda"),
        (False, False, False, "cpu"),
    ],
)
def test_of_several_devices_the_default_is_the_one_that_lightning_takes(
    monkeypatch: pytest.MonkeyPatch,
    simulate_xla: Callable[..., None],
    has_tpu: bool,
    has_mps: bool,
    has_cuda: bool,
    kind: HostKind,
) -> None:
    from lightning.fabric.accelerators.xla import XLAAccelerator
    from lightning.fabric.utilities.device_parser import _select_auto_accelerator

    simulate_xla(tpus=int(has_tpu))
    monkeypatch.setattr(XLAAccelerator, "is_available", lambda: has_tpu)  # it would look for an installed package
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3")
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(has_cuda))
    simulate_gpu(monkeypatch)
    assert Host.detect().kind == kind
    assert _select_auto_accelerator().replace("tpu", "xla") == kind


@pytest.mark.parametrize(("variable", "processor"), [("1", "arm"), ("0", "i386")])
def test_an_apple_gpu_that_lightning_would_not_take_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, variable: str, processor: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("DISABLE_MPS", variable)
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        patch.setattr(platform, "processor", lambda: processor)
        assert Host.detect().kind != "mps"


def test_an_apple_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3")
    assert Host.detect("mps") == Host(kind="mps", device_name="Apple M3")


def test_a_host_is_a_value() -> None:
    assert Host(kind="cpu", device_name="x") == Host(kind="cpu", device_name="x")
    assert hash(Host.detect("cpu")) == hash(Host.detect("cpu"))


def test_importing_the_package_is_light_and_touches_no_device() -> None:
    code = "import sys, lightning_accel; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
