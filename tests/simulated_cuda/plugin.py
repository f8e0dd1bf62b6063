"""``pytest -p simulated_cuda.plugin``: tests, on a machine with a simulated CUDA device."""

from __future__ import annotations

import os

import pytest

from simulated_cuda import device, faults, native

UNAVAILABLE = ""
"""Why there is no device, if there is none: the tests that need it are skipped."""

# Before torch is imported, which tests/conftest.py comes too late for. Two levels of threads, torch's and MKL's, may go
# round in circles in a decomposition.
os.environ.setdefault("OMP_NUM_THREADS", "1")
try:
    device.install()
except native.UnavailableError as error:
    UNAVAILABLE = str(error)


def pytest_report_header() -> str:
    """What stands above the tests."""
    return f"no simulated CUDA device: {UNAVAILABLE}" if UNAVAILABLE else "on a simulated CUDA device"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> object:
    """Fails a test that races, though its numbers may be right."""
    faults.taken()
    result = yield
    if found := faults.taken():
        pytest.fail("on a real device this test would race:\n" + "\n".join(found), pytrace=False)
    return result


def pytest_runtest_teardown() -> None:
    """Ends captures that a test has left under way, for the sake of the next."""
    if not UNAVAILABLE:
        from simulated_cuda import captures
        from simulated_cuda.streams import LIBRARY, set_stream

        captures.forget_all()
        LIBRARY.set_device(0)
        for index in range(native.MOST_DEVICES):
            set_stream((index, 0))
