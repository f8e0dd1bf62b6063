"""The part in C++, ``guard.cpp``: built once for each version of torch, and loaded before torch is imported."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
MOST_DEVICES = 2  # guard.cpp's


class UnavailableError(RuntimeError):
    """There can be no simulated device here; the message says why."""


def load() -> ctypes.CDLL:
    """Makes torch, which must not be imported yet, find a CUDA device guard.

    Raises:
        UnavailableError: Torch is imported already, is a build for real devices, or nothing compiles C++ here.
    """
    if "torch" in sys.modules:
        raise UnavailableError("the simulated CUDA device has to be loaded before torch is imported")
    torch = _folder_of_torch()
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise UnavailableError("this torch is built for CUDA: the simulated device needs one built for CPUs only")
    # A thread of autograd's engine that is ended by force, with the interpreter, calls std::terminate().
    os.environ.setdefault("TORCH_AUTOGRAD_SHUTDOWN_WAIT_TIMEOUT", "0")
    ctypes.CDLL(str(torch / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(_built(torch)), ctypes.RTLD_GLOBAL)
    library.get_stream.restype = ctypes.c_int64
    library.set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.refuse.argtypes = [ctypes.c_char_p]
    return library


def _folder_of_torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise UnavailableError("torch is not installed")
    return Path(found.origin).parent


def _built(torch: Path) -> Path:
    """The shared library, from the cache or built anew."""
    key = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("torch").encode() + str(torch).encode())
    cache = Path(tempfile.gettempdir()) / f"lightning-accel-simulated-cuda-{os.getuid()}"
    library = cache / f"guard-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnavailableError("the simulated CUDA device is built by g++, which is not on the PATH")
    cache.mkdir(mode=0o700, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}")  # two processes may build at once: each its own, and one stays
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}", str(SOURCE)]
    command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(partial)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise UnavailableError(f"g++ could not build the simulated CUDA device:\n{built.stderr[-2000:]}")
    with contextlib.suppress(FileNotFoundError):
        partial.replace(library)
    return library
