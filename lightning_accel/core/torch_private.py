"""Every name of torch's own that the library uses, one function each; nothing else in it has a leading underscore.

A function says why it is needed, since which torch the name is known, and what is done where it is missing. What a new
torch has dropped then fails in one test of tests/core/test_torch_private.py, which says in plain words what broke.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

# -- saved tensors ---------------------------------------------------------------------------------------------------


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` was changed in place: ``_version``, since torch 0.4.

    Autograd compares it for what it saves, and so must whoever saves in its stead. Without it nothing is offloaded.
    """
    return tensor._version


def is_in_backward() -> bool:
    """Whether autograd is walking a graph on this thread: ``_current_graph_task_id``, since torch 2.0."""
    return torch._C._current_graph_task_id() != -1


# -- modules ---------------------------------------------------------------------------------------------------------


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict behind ``register_parameter``: ``_parameters``, since torch 0.1, empty slots and ties among them.

    The public iterators leave both out. Without it, and the two below, no module can be copied for a trial, and every
    trial fails.
    """
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict behind ``register_buffer``: ``_buffers``, since torch 0.1, as for parameters."""
    return module._buffers


def module_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict behind ``add_module``: ``_modules``, since torch 0.1, as for parameters."""
    return module._modules


# -- modes -----------------------------------------------------------------------------------------------------------


class DispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation under it: ``torch.utils._python_dispatch.TorchDispatchMode``, since torch 1.13.

    There is no public base for that. Without it the library cannot be imported.
    """


def is_fake(kind: type[Tensor]) -> bool:
    """Whether tensors of a class have no numbers: ``torch._subclasses.fake_tensor.FakeTensor``, since torch 2.0.

    DTensor asks such for the shapes of what it is about to compute: that is no work. Without it: False, and a mode that
    counts operations may count those too.
    """
    fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
    return issubclass(kind, getattr(fake, "FakeTensor", ()))


def dynamo_is_loaded() -> bool:
    """Whether anything may have been compiled: ``torch._dynamo`` is imported with it, in a second, and only then."""
    return "torch._dynamo" in sys.modules


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Has nobody who watches operations see those inside: ``_disable_current_modes``, since torch 2.0.

    Somebody may be counting FLOPs while a trial runs. Without it every trial fails, and says so.
    """
    return _python_dispatch._disable_current_modes()


# -- layouts ---------------------------------------------------------------------------------------------------------


def convolution_method() -> str:
    """The method that a convolution's forward calls with its weight: ``_conv_forward``, since torch 1.8.

    Patched, it computes on its weight in another layout, while the parameter keeps the one that DDP's buckets have.
    Without the name an AttributeError takes all edits back, and the step runs as the user wrote it.
    """
    return "_conv_forward"


# -- the machine -----------------------------------------------------------------------------------------------------


def cpp_compilers() -> list[str]:
    """The C++ compilers that TorchInductor looks for, in its order: ``torch._inductor.config.cpp.cxx``, torch 2.0.

    Its own look-up raises, and imports the whole code generator. Without the name: none, and nothing is compiled.
    """
    try:
        configured: Any = importlib.import_module("torch._inductor.config").cpp.cxx
    except (ImportError, AttributeError):
        return []
    return [name for name in (configured if isinstance(configured, list | tuple) else (configured,)) if name]


def tpu_library() -> Any:
    """What torch_xla knows of TPUs, ``torch_xla._internal.tpu``, which Lightning asks too; there is no public way.

    Without it (or without torch_xla): an ImportError, and the machine is taken for one without TPUs.
    """
    return importlib.import_module("torch_xla._internal.tpu")
