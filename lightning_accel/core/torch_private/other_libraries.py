"""Private names of other libraries than torch and Lightning."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn


def init_weights_method(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """What initialises the modules within a model: the convention of transformers, whose models write it themselves.

    Without the name: None, and only :func:`~lightning_accel.core.torch_private.modules.reset_method` counts.
    """
    method = getattr(module, "_init_weights", None)
    return method if callable(method) else None


def tpu_library() -> Any:
    """What torch_xla knows of TPUs, ``torch_xla._internal.tpu``, which Lightning asks too; there is no public way.

    Without it (or without torch_xla): an ImportError, and the machine is taken for one without TPUs.
    """
    return importlib.import_module("torch_xla._internal.tpu")
