"""Kernels that torch.compile builds during a run are kept where a reboot leaves them, unless the user says where."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from lightning_accel.experiment.store import kernel_folder
from lightning_accel.techniques import kernel_cache
from lightning_accel.techniques.kernel_cache import VARIABLE

TORCHS_OWN = os.path.join(tempfile.gettempdir(), "torchinductor_somebody")
TRITON = "TRITON_CACHE_DIR"


@pytest.fixture(autouse=True)
def _nobody_has_named_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, TRITON):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever a test does
        monkeypatch.delenv(name)


def test_while_a_run_compiles_torch_looks_in_the_cache_folder() -> None:
    with kernel_cache.kept() as why_not:
        assert why_not == ""
        assert Path(os.environ[VARIABLE]).parent == kernel_folder()
        assert Path(os.environ[VARIABLE]).is_dir()
    assert VARIABLE not in os.environ


def test_torch_itself_looks_there() -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    before = cache_dir()
    with kernel_cache.kept():
        assert Path(cache_dir()).parent == kernel_folder()
        assert Path(triton_cache_dir(0)).is_relative_to(kernel_folder())
    assert cache_dir() == before


def test_what_torch_has_set_itself_is_nobodys_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the compiler sets the one, the first Triton kernel the other."""
    monkeypatch.setenv(VARIABLE, TORCHS_OWN)
    monkeypatch.setenv(TRITON, f"{TORCHS_OWN}/triton/1")
    with kernel_cache.kept():
        within = Path(os.environ[VARIABLE])
        assert within.parent == kernel_folder()
        assert Path(os.environ[TRITON]) == within / "triton" / "1"
    assert (os.environ[VARIABLE], os.environ[TRITON]) == (TORCHS_OWN, f"{TORCHS_OWN}/triton/1")


def test_what_torch_sets_in_the_meantime_goes_with_it() -> None:
    with kernel_cache.kept():
        os.environ[TRITON] = f"{os.environ[VARIABLE]}/triton/0"
    assert TRITON not in os.environ


def test_a_folder_that_the_user_has_named_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv(TRITON, f"{tmp_path}/triton/0")
    with kernel_cache.kept() as why_not:
        assert (os.environ[VARIABLE], os.environ[TRITON], why_not) == (str(tmp_path), f"{tmp_path}/triton/0", "")


def test_tritons_folder_alone_can_be_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TRITON, str(tmp_path))
    with kernel_cache.kept():
        assert os.environ[TRITON] == str(tmp_path)
        assert Path(os.environ[VARIABLE]).parent == kernel_folder()
    assert os.environ[TRITON] == str(tmp_path)


def test_what_the_user_sets_in_the_middle_stays(tmp_path: Path) -> None:
    with kernel_cache.kept():
        os.environ[VARIABLE] = str(tmp_path)
    assert os.environ[VARIABLE] == str(tmp_path)


def test_of_two_runs_at_a_time_the_last_puts_it_back() -> None:
    first, second = kernel_cache.kept(), kernel_cache.kept()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Path(os.environ[VARIABLE]).parent == kernel_folder()
    second.__exit__(None, None, None)
    assert VARIABLE not in os.environ


def test_an_error_puts_it_back_too() -> None:
    with pytest.raises(KeyError), kernel_cache.kept():
        raise KeyError
    assert VARIABLE not in os.environ


def test_where_it_cannot_be_written_torchs_own_stays_with_the_reason() -> None:
    kernel_folder().parent.mkdir()
    kernel_folder().touch()
    with kernel_cache.kept() as why_not:
        assert VARIABLE not in os.environ
    assert "cannot be written to: Not a directory" in why_not


def test_processors_with_other_instructions_share_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ is built for the processor at hand, and a home folder may be that of many machines."""
    found = set()
    for flags in ("sse avx", "sse avx avx2"):
        monkeypatch.setattr(kernel_cache, "from_cpuinfo", lambda key, flags=flags: flags)
        with kernel_cache.kept():
            found.add(os.environ[VARIABLE])
    assert len(found) == 2


def test_a_torch_told_to_do_without_its_widest_vectors_shares_none_with_one_that_was_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own look-up returns them: other numbers one way round, the end of the process the other."""
    found = set()
    for told in ("", "avx2"):
        with monkeypatch.context() as torchs:
            torchs.setenv("ATEN_CPU_CAPABILITY", told)
            with kernel_cache.kept():
                found.add(os.environ[VARIABLE])
    assert len(found) == 2
