"""`AccelFabricPlugin`: :func:`~lightning_accel.accelerate` for loops of Lightning Fabric."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accel.assembly import AcceleratedModel, accelerate
from lightning_accel.lightning.packages import FabricPrecision
from lightning_accel.lightning.plugin_base import PluginBase, Reports
from lightning_accel.settings import Plan
from lightning_accel.techniques.mixed_precision import MixedPrecision


class AccelFabricPlugin(PluginBase, FabricPrecision):
    """Makes a Fabric loop run faster and smaller: ``Fabric(plugins=[AccelFabricPlugin()])``.

    It takes the settings of a :class:`~lightning_accel.Plan`, as ``AccelPlugin`` does. From the first forward on, it
    applies :func:`~lightning_accel.accelerate` to the module given to ``fabric.setup``. Several modules that are set up
    before then count as one list, with blocks named ``"0.encoder"``, ``"1.head"``. A step begins with a forward in
    training mode and ends with the optimizer's step; of several optimizers, the one that steps first in the run ends
    each step. :meth:`teardown` restores the modules.

    Attributes:
        plan: The settings.
        precision: The requested precision, with ``"32-true"`` for ``"auto"``; the report shows the resolved one.

    Raises:
        ValueError: A value is not among those allowed, or two settings contradict each other.
    """

    precision: Any

    @override
    def _configure(self, settings: dict[str, Any]) -> None:
        self.plan = Plan(**settings)
        precision = self.plan.of("precision")
        self.precision = "32-true" if precision == "auto" else precision
        self._reports = Reports()
        self._modules: list[nn.Module] = []
        self._handle: AcceleratedModel | None = None
        self._ends_step: Any = None  # the optimizer whose step ends a training step
        self._is_in_step = False  # a forward of a training step has begun

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self._handle is not None:  # a handle of an earlier run
            self.teardown()
        self._modules.append(module)
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        if self._handle is None and self._modules:  # the modules are on their device only now
            whole = self._modules[0] if len(self._modules) == 1 else nn.ModuleList(self._modules)
            self._handle = accelerate(whole, self.plan)
            self._reports.begin(self._handle.report, is_fitting=True)
        return data if self._handle is None else self._handle.batch(data)

    @override
    def forward_context(self) -> AbstractContextManager[None]:
        if self._handle is None:
            return nullcontext()
        if not (any(module.training for module in self._modules) and torch.is_grad_enabled()):
            return self._handle.step("validate")
        if self._is_in_step:
            return self._handle.engine.step("train")
        self._is_in_step = True
        return self._handle.step("train")

    @override
    def convert_output(self, data: Any) -> Any:
        is_cast = self._handle is not None and self._handle.engine.technique(MixedPrecision) is not None
        return apply_to_collection(data, Tensor, _in_default_dtype) if is_cast else data

    @override
    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        scaled = tensor if self._handle is None else self._handle.scaler.scale(tensor)
        super().backward(scaled, model, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._ends_step = optimizer if self._ends_step is None else self._ends_step
        self._is_in_step &= optimizer is not self._ends_step
        if self._handle is None:
            return super().optimizer_step(optimizer, **kwargs)
        result = self._handle.scaler.step(optimizer, **kwargs)
        self._handle.scaler.update()
        return result

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self._handle is not None:
            self._handle.scaler.unscale_(optimizer)

    @override
    def teardown(self) -> None:
        if self._handle is not None:
            self._handle.undo()
        self._modules, self._handle = [], None
        self._ends_step, self._is_in_step = None, False


def _in_default_dtype(value: Tensor) -> Tensor:
    return value.to(torch.get_default_dtype()) if value.dtype in (torch.float16, torch.bfloat16) else value
