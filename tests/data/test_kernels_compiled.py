"""The fused kernel as NVIDIA's run-time compiler takes it, for cards from Turing to Blackwell; no card is needed."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
from pathlib import Path
from typing import get_args

import pytest

from lightning_accel.data.single_pass import CHANNEL_COUNTS, INPUTS, SOURCE, Kind, Specialisation

CARDS = (75, 80, 86, 89, 90, 100, 120)  # compute capabilities: those that a compiler does not know are left out
EVERY = [
    Specialisation(channels=channels, source=source, kind=kind, channels_last=channels_last, wide=wide)
    for channels, source, kind, channels_last, wide in itertools.product(
        (0, *CHANNEL_COUNTS), INPUTS, get_args(Kind), (False, True), (False, True)
    )
]


class RunTimeCompiler:
    """NVRTC, from the wheel that a torch for CUDA brings."""

    def __init__(self, library: Path) -> None:
        self._nvrtc = ctypes.CDLL(str(library))

    def knows(self, capability: int) -> bool:
        count = ctypes.c_int()
        self._nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self._nvrtc.nvrtcGetSupportedArchs(known)
        return capability in known

    def machine_code(self, specialisation: Specialisation, capability: int) -> int:
        """The size of what is compiled, in bytes; what the compiler says against it fails the test."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        source = SOURCE.read_bytes()
        self._nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"single_pass.cu", 0, None, None)
        given = [option.encode() for option in (f"--gpu-architecture=sm_{capability}", *specialisation.options)]
        status = self._nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        self._nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        said = ctypes.create_string_buffer(size.value)
        self._nvrtc.nvrtcGetProgramLog(program, said)
        assert (status, said.value.decode().strip()) == (0, ""), f"{specialisation} for sm_{capability}"
        self._nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        self._nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return size.value


@pytest.fixture(scope="module")
def compiler() -> RunTimeCompiler:
    nvidia = importlib.util.find_spec("nvidia")
    folders = map(Path, nvidia.submodule_search_locations or ()) if nvidia is not None else ()
    found = [path for folder in folders for path in folder.rglob("libnvrtc.so.*")]
    if not found:
        pytest.skip("no wheel of NVRTC here: a torch for CUDA brings it")
    return RunTimeCompiler(found[0])


@pytest.mark.parametrize("capability", CARDS)
def test_it_compiles_for_every_card(compiler: RunTimeCompiler, capability: int) -> None:
    if not compiler.knows(capability):
        pytest.skip(f"this compiler does not know sm_{capability}")
    for specialisation in EVERY[:: len(EVERY) // 8]:
        assert compiler.machine_code(specialisation, capability) > 1000


@pytest.mark.slow
def test_it_compiles_in_every_specialisation(compiler: RunTimeCompiler) -> None:
    assert len(EVERY) == 96
    for specialisation in EVERY:
        assert compiler.machine_code(specialisation, 90) > 1000
