"""A machine's name in a table and in a file: the same for the same kind of machine, another for another."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accel.claims.machine import machine, slug, title
from lightning_accel.core.host import Host

AMD = {"device": "AMD EPYC", "kind": "cpu", "instructions": "AVX2", "native_bf16": False, "cores": 2}
CARD = {"device": "NVIDIA H100", "kind": "cuda", "instructions": "", "native_bf16": True, "cores": 16}


def test_two_processors_of_one_name_have_two() -> None:
    newer = {**AMD, "instructions": "AVX512-BF16", "native_bf16": True}
    assert (slug(AMD), slug(newer)) == ("amd-epyc-avx2-2-cores", "amd-epyc-avx512-bf16-2-cores")
    assert title(AMD) == "AMD EPYC, AVX2, 2 cores, no bfloat16 in hardware"
    assert title(newer) == "AMD EPYC, AVX512-BF16, 2 cores, bfloat16 in hardware"
    assert title({**newer, "native_bf16": False}) == "AMD EPYC, AVX512-BF16, 2 cores, slower in bfloat16"


@pytest.mark.parametrize(
    "device",
    ["Intel(R) Xeon(R) CPU @ 2.80GHz", "Intel(R) Xeon(R) Processor @ 2.90GHz", "Intel Xeon Processor", "Intel Xeon"],
)
def test_the_clock_and_the_vendor_s_marks_make_no_other_machine(device: str) -> None:
    assert slug({**AMD, "device": device, "instructions": "AVX-512"}) == "intel-xeon-avx-512-2-cores"


def test_a_card_is_itself_beside_any_number_of_cores() -> None:
    assert slug(CARD) == slug({**CARD, "cores": 2}) == "nvidia-h100"
    assert title(CARD) == "NVIDIA H100, bfloat16 in hardware"


@pytest.mark.parametrize("host", [None, Host(kind="xla", device_name="TPU v5", native_bf16=True)])
def test_a_machine_is_what_its_host_is_and_the_versions_on_it(host: Host | None) -> None:
    about: dict[str, Any] = machine(host)
    expected = host or Host.detect()
    assert (about["device"], about["native_bf16"]) == (expected.device_name, expected.native_bf16)
    assert {"kind", "instructions", "cores", "threads", "torch", "python"} <= about.keys()
    assert slug(about)
