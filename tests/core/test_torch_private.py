"""Every private name of torch that the library uses is there, and means what it is used for."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core import torch_private

# -- saved tensors ---------------------------------------------------------------------------------------------------


def test_a_tensor_tells_how_often_it_was_written_to() -> None:
    """Else a trial and an offloader would give a backward pass a tensor that was overwritten since."""
    x = torch.zeros(2)
    x.add_(1)
    assert torch_private.version_of(x) == 1
    assert torch_private.version_of(x[:1]) == 1


def test_a_backward_pass_is_known_from_within() -> None:
    """Else the forward passes that checkpointing repeats would count as work of the model."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch_private.is_in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not torch_private.is_in_backward()


# -- modules ---------------------------------------------------------------------------------------------------------


class Slots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.tied = self.weight
        self.register_parameter("bias", None)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("absent", None)
        self.inner = nn.ReLU()
        self.add_module("empty", None)


def test_a_module_shows_its_parameters_ties_and_empty_slots_among_them() -> None:
    """Else the copy of a module that a trial runs would share its dicts with the module itself."""
    module = Slots()
    assert torch_private.parameter_slots(module) == {"weight": module.weight, "tied": module.weight, "bias": None}


def test_a_module_shows_its_buffers_and_a_change_there_is_a_change_of_the_module() -> None:
    """Else a buffer that a forward pass assigned anew could not be put back after a trial."""
    module = Slots()
    assert torch_private.buffer_slots(module) == {"mean": module.mean, "absent": None}
    torch_private.buffer_slots(module)["mean"] = torch.ones(2)
    assert module.mean.tolist() == [1.0, 1.0]


def test_a_module_shows_the_modules_inside() -> None:
    """Else the copy of a module that a trial runs would run the module's own parts, hooks and all."""
    module = Slots()
    assert torch_private.module_slots(module) == {"inner": module.inner, "empty": None}


# -- modes -----------------------------------------------------------------------------------------------------------


def test_a_dispatch_mode_sees_operations_and_nobody_does_without_modes() -> None:
    """Else no FLOPs could be counted; and whoever counts them in a run would count those of its trials."""

    class Seeing(torch_private.DispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Tensor:
            self.operations += 1
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2)
    with Seeing() as seeing:
        with torch_private.without_dispatch_modes():
            x + 1
        assert seeing.operations == 0
        x + 1
        assert seeing.operations == 1


def test_tensors_that_only_have_a_shape_are_told_from_others() -> None:
    """Else what DTensor asks about shapes would count as FLOPs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert torch_private.is_fake(type(torch.empty(2)))
    assert not torch_private.is_fake(Tensor)
    assert not torch_private.is_fake(nn.Parameter)


def test_what_compiles_is_known_once_something_was() -> None:
    """Else the step whose FLOPs are counted would turn compilation off for the rest of the run."""
    torch.compile(lambda x: x, backend="eager")
    assert torch_private.dynamo_is_loaded()


# -- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("convolution", "num_dims"), [(nn.Conv2d(1, 1, 1), 4), (nn.Conv3d(1, 1, 1), 5)])
def test_a_convolution_computes_with_the_weight_that_one_method_is_given(convolution: nn.Module, num_dims: int) -> None:
    """Else a layout could not be given up in mid-run where DistributedDataParallel is at work."""
    name = torch_private.convolution_method()
    original = getattr(convolution, name)
    setattr(convolution, name, lambda x, weight, bias: original(x, torch.zeros_like(weight), None))
    assert not convolution(torch.ones([1] * num_dims)).any()


# -- the machine -----------------------------------------------------------------------------------------------------


def test_inductor_tells_its_compilers() -> None:
    """Else a machine with a C++ compiler would be said to have none, and nothing compiled on it."""
    names = torch_private.cpp_compilers()
    assert names
    assert all(isinstance(name, str) for name in names)
    assert any(map(shutil.which, names)) is (shutil.which("g++") is not None)


def test_what_lightning_asks_of_tpus_is_what_is_asked_here() -> None:
    """Else a machine with TPUs would be taken for one without: this is where Lightning's own code looks."""
    import inspect

    from lightning.fabric.accelerators import xla

    module, _, name = "torch_xla._internal.tpu".rpartition(".")
    assert f"from {module} import {name}" in inspect.getsource(xla)
    with pytest.raises(ImportError):
        torch_private.tpu_library()
