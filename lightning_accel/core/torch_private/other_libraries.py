"""Private names of libraries other than torch and Lightning."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn


def init_weights_method(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Returns the method that initialises the modules inside a model: a convention of the transformers library.

    Without the name: None, and only :func:`~lightning_accel.core.torch_private.modules.reset_method` counts.
    """
    method = getattr(module, "_init_weights", None)
    return method if callable(method) else None


def tpu_library() -> Any:
    """Returns torch_xla's module about TPUs, ``torch_xla._internal.tpu``, which Lightning uses too.

    There is no public module. Without it or torch_xla: an ImportError, and the machine counts as one without TPUs.
    """
    return importlib.import_module("torch_xla._internal.tpu")
