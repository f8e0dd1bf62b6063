"""Memory layouts of weights, batches and optimizer states: changed, kept in step with each other, and restored."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.core.torch_private.modules import convolution_method

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
FORMAT_NAMES = {4: "channels_last", 5: "channels_last_3d"}


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor is an image in channels_last, or in channels_last_3d, and not in the ordinary layout as well."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.dim() not in FORMATS or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=FORMATS[tensor.dim()])


def in_format(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """``tensor`` in a channels_last format, with the strides by which operators recognise it.

    One channel, or one pixel, is contiguous in both orders, and ``.contiguous()`` leaves it as it is. Operators then
    take it for contiguous, and one such weight puts the activations of all that follow into the wrong format.
    """
    dense = tensor.contiguous(memory_format=memory_format)
    strides = torch.empty(tensor.shape, device="meta", memory_format=memory_format).stride()
    return dense if dense.stride() == strides else dense.as_strided(dense.shape, strides)


def with_strides(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """``tensor`` itself if it has these strides, else a copy that does."""
    if tensor.stride() == tuple(stride):
        return tensor
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


class WeightLayout(Patch):
    """Holds a convolution's weights in channels_last. Values, shapes and the parameters themselves stay.

    Its input follows where it is called: batches are left as they are, since callbacks and the user's own random draws
    see them too.

    Attributes:
        lays_input: Whether it does so yet: not before the step after the one in which the weights were moved, whose
            backward pass may compute its forward once more.
        convolution: The module.
        strides: For every parameter changed, the strides it had.
    """

    settle = 1

    def __init__(self, site: str, convolution: nn.Module, dim: int) -> None:
        super().__init__(site, f"weight → {FORMAT_NAMES[dim]}")
        self.lays_input = False
        self.convolution = convolution
        self._parameters = [p for p in convolution.parameters() if p.dim() == dim]
        self._format = FORMATS[dim]
        self.strides: dict[nn.Parameter, tuple[int, ...]] = {}
        self._is_shown = False
        self._takes_input = hasattr(convolution, convolution_method())  # transposed convolutions do not
        self._held = MethodPatch(site, "contiguous weight", convolution, convolution_method(), _on_contiguous_weight)
        self._input = MethodPatch(site, "input in its format", convolution, convolution_method(), self._on_laid_out)

    @override
    def switch(self, variant: str) -> None:
        self.resume()
        super().switch(variant)

    def hold(self) -> None:
        """Computes as after :meth:`undo`, on a contiguous copy of the weight, but leaves the weight's layout alone.

        For layouts given up in mid-run where DistributedDataParallel is at work. Its buckets keep the strides that
        the weights had when it was made, or after its first step: where they change later it permutes the elements
        of every gradient, without an error (torch 2.11 to 2.13).
        """
        if not self._held.is_applied:
            self._apply()
            self._input.undo()
            self._held.apply()

    def release(self) -> None:
        """Ends :meth:`hold`; the weight gets its own layout back."""
        if self._held.is_applied:
            self._held.undo()
            self._undo()

    def _on_laid_out(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Lays the input out once: left to itself, a convolution does so again in its backward pass."""

        def convolve(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if module is not self.convolution:  # a copy, made in mid-run: it is the user's own
                return original(module, x, weight.contiguous(), bias)
            if self.lays_input and x.dim() == weight.dim() and x.layout == torch.strided:  # no image without a batch
                x = x.contiguous(memory_format=self._format)
            return original(module, x, weight, bias)

        return convolve

    def show(self) -> None:
        """Gives the weights the user's own layout until :meth:`resume`: somebody looks at them between two steps."""
        if self.is_applied and not self._is_shown:
            self._undo()
            self._is_shown = True

    def resume(self) -> None:
        """Ends :meth:`show`."""
        if self._is_shown:
            self._is_shown = False
            if self.is_applied:
                self._apply()

    # Outside inference mode, where a trial may find itself: what it allocates could never be trained again.

    @override
    @torch.inference_mode(False)
    def _apply(self) -> None:
        self._held.undo()
        for parameter in self._parameters:
            converted = in_format(parameter.data, self._format)
            if converted.stride() == parameter.stride():
                continue  # tied to another convolution's, which has the strides to restore
            self.strides[parameter] = parameter.stride()
            parameter.data = converted
            _match_gradient(parameter)
        if self._takes_input:
            self._input.apply()

    @override
    @torch.inference_mode(False)
    def _undo(self) -> None:
        self._input.undo()
        for parameter, stride in self.strides.items():
            parameter.data = with_strides(parameter.data, stride)
            _match_gradient(parameter)
        self.strides.clear()


def _on_contiguous_weight(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolve(self: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return original(self, x, weight.contiguous(), bias)

    return convolve


def _match_gradient(parameter: nn.Parameter) -> None:
    if parameter.grad is not None and parameter.grad.layout == torch.strided:
        parameter.grad.data = with_strides(parameter.grad.data, parameter.stride())


class OptimizerLayouts:
    """Keeps optimizer states in the layout of their parameters.

    Fused optimizers walk parameter and state by their addresses: where the strides differ they update the wrong
    elements, without an error (``AdamW(fused=True)`` on CPU, torch 2.13). They differ after a checkpoint of a
    contiguous run is loaded, and after weights change their layout in mid-run; the states of watched optimizers are
    matched then, and by :meth:`match`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = set(parameters)
        self._hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle | None] = weakref.WeakKeyDictionary()

    def watch(self, optimizer: Optimizer) -> bool:
        """Watches over an optimizer, and says whether it is a new one that holds some of the parameters."""
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if optimizer in self._hooks or not any(parameter in self._parameters for parameter in held):
            return False
        self._match_one(optimizer)
        self._hooks[optimizer] = None
        # What wraps another may leave super().__init__() out, and with it all hooks; the other has them.
        with suppress(AttributeError):
            # A state that is loaded has the layouts of the run that saved it.
            self._hooks[optimizer] = optimizer.register_load_state_dict_post_hook(self._match_one)
        return True

    def match(self) -> None:
        """Brings the states of every watched optimizer in step with its parameters."""
        for optimizer in list(self._hooks):
            self._match_one(optimizer)

    def close(self) -> None:
        for hook in filter(None, self._hooks.values()):
            hook.remove()

    def _match_one(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            if parameter in self._parameters and isinstance(state, dict):
                for value in state.values():
                    if _belongs_to(value, parameter):
                        value.data = with_strides(value.data, parameter.stride())


def reads_by_layout(optimizer: Optimizer) -> str | None:
    """Why an optimizer may fail, or go wrong, on weights and gradients in another layout; None for those known not to.

    Torch's own work element by element, but for LBFGS, which calls ``.view(-1)`` on every gradient. What others do
    cannot be known: some Muons call ``grad.view(len(grad), -1)``, 8-bit optimizers keep flat states.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        return f"{name} calls .view(-1) on gradients, which channels_last lays out otherwise"
    if not type(optimizer).step.__module__.startswith("torch.optim"):
        return f"{name} is not an optimizer of torch's and may read gradients by their layout"
    return None


def restore_layouts(
    checkpoint: dict[str, Any],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strides: Mapping[nn.Parameter, tuple[int, ...]],
) -> None:
    """Gives a checkpoint the layouts that a plain run's would have, so that a plain run can go on from it.

    The tensors in use are left alone.
    """
    state_dict = checkpoint["state_dict"]
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in strides and name in state_dict:
            state_dict[name] = with_strides(state_dict[name], strides[parameter])
    for optimizer, saved in zip(optimizers, checkpoint.get("optimizer_states", ()), strict=False):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = saved.get("state", {})  # others than torch's may save what they like
        for index, parameter in enumerate(parameters):
            if parameter in strides and isinstance(state := states.get(index), dict):
                # A new dict: the one in the checkpoint is the optimizer's own.
                states[index] = {
                    key: with_strides(value, strides[parameter]) if _belongs_to(value, parameter) else value
                    for key, value in state.items()
                }


def _belongs_to(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
