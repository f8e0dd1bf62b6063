"""What the tests of offloading share: offloaders of which nothing may be left, and tensors that have moved."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from lightning_accel.memory.offload import Offloader, Offloading
from lightning_accel.memory.saved_tensors import Packed

pytest.importorskip("resource")  # which is where open files can be counted

CPU = torch.device("cpu")
PLACES = ["host", "disk"]
NO_MODEL = nn.Module()

Make = Callable[..., Offloader]


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """With the thread that copies there are otherwise more than there are cores, and operators wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes offloaders that take every tensor, and closes them; then no thread, mapping or file may be left."""
    folder = tmp_path / "spill"
    folder.mkdir()
    made: list[Offloader] = []
    before = psutil.Process().num_fds()

    def make(to: str = "host", device: torch.device = CPU, **options: Any) -> Offloader:
        settings: dict[str, Any] = {"min_bytes": 1, "folder": str(folder), **options}
        made.append(Offloader(device, Offloading(to, **settings)))  # type: ignore[arg-type]
        return made[-1]

    gc.freeze()  # to look for garbage among what the test makes, not among all that the suite has imported
    yield make
    for offloader in made:
        offloader.close()
    made.clear()
    gc.collect()
    gc.unfreeze()
    assert not copying_threads()
    assert list(folder.iterdir()) == []
    assert psutil.Process().num_fds() <= before


def copying_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lightning-accel-offload")]


def wave(x: Tensor, layers: int = 8) -> Tensor:
    """Every layer saves its input, which nothing else keeps."""
    for _ in range(layers):
        x = x.sin()
    return x


def packed_away(offloader: Offloader, tensor_of: Callable[[], Tensor]) -> Packed:
    """A tensor that is on the device no more."""
    tensor = tensor_of()
    storage = weakref.ref(tensor.untyped_storage())
    packed = offloader.pack(tensor)
    assert packed is not None
    del tensor
    while storage() is not None:  # others push it out
        assert offloader.pack(torch.zeros(1000)) is not None
    return packed
