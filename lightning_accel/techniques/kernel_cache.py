"""Where torch.compile keeps what it builds: while runs of ours compile, in a folder that outlives a reboot.

Torch's own folder is one for temporary files. Another can be named in mid-process: torch reads the variable at every
look-up, and hands it to its compile workers with each task. Needs no torch.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_accel.core.processor import from_cpuinfo
from lightning_accel.experiment.digest import digest
from lightning_accel.experiment.store import kernel_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TRITON = "TRITON_CACHE_DIR"  # torch sets it, at the first kernel, to a folder within the other

_runs = 0  # that have their kernels kept
_before: dict[str, str | None] = {}  # the variables, while there are any


@contextmanager
def kept() -> Iterator[str]:
    """Has torch keep what this process compiles in the cache folder, unless the user has named a folder.

    Yields:
        Why it stays in torch's own folder; empty where it does not, or is the user's to decide.
    """
    global _runs
    if not _runs:
        if not _is_torchs_own(os.environ.get(VARIABLE)):
            yield ""
            return
        # C++ is written and built for this very processor, of which torch's look-up knows nothing: kernels of other
        # vectors compute other numbers, or end the process. And a home folder may be that of many machines.
        within = kernel_folder() / _processor()
        try:
            within.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=within).close()
        except OSError as error:
            yield f"{within} cannot be written to: {error.strerror}"
            return
        _redirect(within)
    _runs += 1
    try:
        yield ""
    finally:
        _runs -= 1
        if not _runs:
            _restore()


def _redirect(within: Path) -> None:
    triton = os.environ.get(_TRITON)
    _before.update({VARIABLE: os.environ.get(VARIABLE)})
    os.environ[VARIABLE] = str(within)
    if _is_torchs_own(triton):
        _before[_TRITON] = triton
        if triton is not None:
            os.environ[_TRITON] = str(within / "triton" / Path(triton).name)


def _restore() -> None:
    for name, value in _before.items():
        if not Path(os.environ.get(name, "")).is_relative_to(kernel_folder()):
            continue  # the user's by now
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    _before.clear()


def _is_torchs_own(value: str | None) -> bool:
    """Whether nobody has named a folder: importing the compiler sets the variable to its own, by the user's name."""
    return value is None or os.path.abspath(value).startswith(os.path.join(tempfile.gettempdir(), "torchinductor_"))


def _processor() -> str:
    able_to = from_cpuinfo("flags") or from_cpuinfo("Features") or platform.processor()
    told = os.environ.get("ATEN_CPU_CAPABILITY", "")  # by which the user has torch do without its widest vectors
    return digest(platform.machine(), able_to, told)
