"""A compiler that knows nothing of other tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing compiled by another test, no pool of threads, and not the variable that TorchInductor leaves behind."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)
