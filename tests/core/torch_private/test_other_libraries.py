"""What breaks when another library drops one of its private names, in plain words: a test a name."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from lightning_accel.core.torch_private.other_libraries import init_weights_method, tpu_library


def test_init_weights_is_how_transformers_models_start() -> None:
    """Without it ``accel_fsdp`` starts such models, made on the meta device, from other weights than they want."""

    class Model(nn.Module):
        def _init_weights(self, module: nn.Module) -> None: ...

    assert init_weights_method(Model()) is not None
    assert init_weights_method(nn.Linear(2, 2)) is None


def test_what_lightning_asks_of_tpus_is_what_is_asked_here() -> None:
    """Else a machine with TPUs would be taken for one without: this is where Lightning's own code looks."""
    from lightning.fabric.accelerators import xla

    module, _, name = "torch_xla._internal.tpu".rpartition(".")
    assert f"from {module} import {name}" in inspect.getsource(xla)
    with pytest.raises(ImportError):
        tpu_library()
