"""The backends of flash attention: which there are on a host, and what the others say of the way to get them."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from lightning_accel import AccelError, AccelWarning, Host
from lightning_accel.techniques.flash_attention.backends import BACKENDS, installed_backends
from lightning_accel.techniques.flash_attention.settings import FlashAttentionSetting
from support.attention_zoo import FOUND
from support.techniques.flash_attention.technique_runs import Stack, start


def test_the_plan_names_every_backend() -> None:
    assert set(get_args(FlashAttentionSetting)) == {"auto", "off", *BACKENDS}


@pytest.mark.parametrize(
    ("backend", "mend"),
    [("flash-attn", "runs on NVIDIA"), ("fa3", "use 'sdpa'"), ("flex", "use 'sdpa'"), ("cudnn", "no cudnn attention")],
)
def test_a_backend_that_is_not_here_is_a_warning_that_names_those_that_are(backend: str, mend: str) -> None:
    with pytest.warns(
        AccelWarning, match=rf"flash_attention: backend '{backend}': .*{mend}.*Here there are: sdpa, flash"
    ):
        start(Stack(FOUND["at_sign"]), backend).undo()
    with pytest.raises(AccelError):
        start(Stack(FOUND["at_sign"]), backend, strict=True)


OLD = Host(kind="cuda", device_name="Tesla T4", capability=(7, 5))
NEW = Host(kind="cuda", device_name="H200", capability=(9, 0), native_bf16=True, compiler="triton")


def test_a_gpu_that_is_too_old_is_told_so() -> None:
    reason = BACKENDS["flash"].unavailable(OLD)
    assert reason == "Tesla T4 is too old for it: compute capability 7.5, 8.0 is needed; use 'sdpa'"


@pytest.mark.parametrize(
    ("backend", "mend"),
    [
        ("flash-attn", "pip install 'lightning-accel[flash]'"),
        ("fa3", "github.com/Dao-AILab/flash-attention"),
        ("fa4", "pip install flash-attn-4"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(backend: str, mend: str) -> None:
    assert mend in (BACKENDS[backend].unavailable(NEW) or "")
    assert BACKENDS[backend].unavailable(dataclasses.replace(NEW, kernels=frozenset({backend}))) is None


AMD = Host(kind="rocm", device_name="MI300X", arch="gfx942", native_bf16=True, compiler="triton")


@pytest.mark.parametrize(
    ("arch", "found"),
    [
        ("gfx942", ["sdpa", "flash", "efficient", "flex"]),
        ("gfx1100", ["sdpa", "flash", "efficient", "flex"]),
        ("gfx1151", ["sdpa", "flash", "efficient", "flex"]),  # experimental: torch says so of each call
        ("gfx1030", ["sdpa", "flex"]),
        ("", ["sdpa", "flash", "efficient", "flex"]),  # not known: torch is asked when it is tried
    ],
)
def test_on_amd_cards_there_are_the_kernels_that_torch_has_for_the_architecture(arch: str, found: list[str]) -> None:
    host = dataclasses.replace(AMD, arch=arch)
    assert [backend.name for backend in installed_backends(host)] == found


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("cudnn", "MI300X is AMD's"), ("fa3", "MI300X is AMD's"), ("fa4", "is AMD's"), ("flash-attn", "for ROCm")],
)
def test_on_amd_cards_the_others_say_why_not(backend: str, reason: str) -> None:
    assert reason in (BACKENDS[backend].unavailable(AMD) or "")
