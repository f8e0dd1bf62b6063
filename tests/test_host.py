"""A host says what a machine has, or what a machine that is not at hand would have."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from lightning_accel.host import Host


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
    ("capabilities", "is_native"),
    [
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True, "avx512_bf16": False}, True),
        ({"avx2": True}, False),
        ({}, False),
    ],
)
def test_bfloat16_is_native_with_avx512_bf16_or_amx(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], is_native: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert Host.detect("cpu").native_bf16 is is_native


def test_torch_without_get_capabilities_is_asked_the_single_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert Host.detect("cpu").native_bf16


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
    monkeypatch.setattr(torch.version, "hip", "6.0" if is_rocm else None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    host = Host.detect("cuda:0")
    assert (host.kind, host.device_name, host.capability, host.native_bf16) == (kind, "a card", capability, False)


def test_a_host_is_a_value() -> None:
    assert Host(kind="cpu", device_name="x") == Host(kind="cpu", device_name="x")
    assert hash(Host.detect("cpu")) == hash(Host.detect("cpu"))


def test_importing_the_package_is_light_and_touches_no_device() -> None:
    code = "import sys, lightning_accel; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
