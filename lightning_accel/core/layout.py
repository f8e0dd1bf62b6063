"""Memory layouts of weights, inputs and optimizer states: changes, matches and restores them."""

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
from lightning_accel.core.ranks import has_ranks
from lightning_accel.core.torch_private.modules import convolution_method
from lightning_accel.core.torch_private.tensors import handles_on_storage

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
FORMAT_NAMES = {4: "channels_last", 5: "channels_last_3d"}


def is_channels_last(tensor: Tensor) -> bool:
    """Returns whether a tensor lies in memory as images in channels_last do, or as one of them or their rows do."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_nested:
        return False
    if not 3 <= tensor.dim() <= 5 or tensor.is_contiguous():
        return False
    return any(tensor.movedim(channels, -1).is_contiguous() for channels in (0, 1))


def in_format(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Returns ``tensor`` in a channels_last format, with the strides by which operators recognise the format.

    A tensor with one channel or one pixel is contiguous in both orders, and ``.contiguous()`` does not change its
    strides. Operators then treat it as contiguous. One such weight puts all following activations into the wrong
    format.
    """
    dense = tensor.contiguous(memory_format=memory_format)
    strides = torch.empty(tensor.shape, device="meta", memory_format=memory_format).stride()
    return dense if dense.stride() == strides else dense.as_strided(dense.shape, strides)


def with_strides(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Returns ``tensor`` itself if it has these strides, otherwise a copy that does."""
    if tensor.stride() == tuple(stride):
        return tensor
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


class WeightLayout(Patch):
    """Keeps a convolution's weights in channels_last. Values, shapes and the parameter objects stay the same.

    The convolution converts its own input. Batches stay as they are, since callbacks and the user's random draws see
    them. The weights follow an applied edit by :meth:`lay`, between two steps: then nobody but the user can hold them.

    Attributes:
        lays_input: Whether inputs are converted. False in the step that decides on the layout: its backward pass may
            recompute its forward.
        convolution: The module.
        strides: The previous strides of every parameter that is laid out.
    """

    settle = 1

    def __init__(self, site: str, convolution: nn.Module, dim: int) -> None:
        super().__init__(site, f"weight → {FORMAT_NAMES[dim]}")
        self.lays_input = False
        self.convolution = convolution
        self._parameters = [p for p in convolution.parameters() if p.dim() == dim]
        self._format = FORMATS[dim]
        self.strides: dict[nn.Parameter, tuple[int, ...]] = {}
        self._is_held = False
        self._has_method = hasattr(convolution, convolution_method())  # transposed convolutions do not
        self._method = MethodPatch(site, "weight and input alike", convolution, convolution_method(), self._laid_out)

    def hold(self) -> None:
        """Computes on a contiguous copy of the weight, as after :meth:`undo`, but keeps the weight's layout.

        Used if a layout is given up during a run with DistributedDataParallel. Its buckets keep the strides that the
        weights had at its creation or after its first step. If strides change later, it permutes the elements of every
        gradient, without an error (torch 2.11 to 2.13).
        """
        if not self._is_held:
            self.lay()
            self._method.apply()
            self._is_held = True

    def release(self) -> None:
        """Ends :meth:`hold` and gives the weight its own layout back."""
        if self._is_held:
            self._is_held = False
            self._undo()

    def _laid_out(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Converts the input once. Otherwise a convolution converts it again in its backward pass."""

        def convolve(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if self._is_held or module is not self.convolution:  # a copy made during the run belongs to the user
                weight = weight.contiguous()
            elif self.lays_input and x.dim() == weight.dim() and x.layout == torch.strided:  # skips unbatched images
                x = x.contiguous(memory_format=self._format)
            return original(module, x, weight, bias)

        return convolve

    def has_aliases(self) -> bool:
        """Returns whether other tensors have the memory of a weight or its gradient, and would not follow it."""
        tensors = [*self._parameters, *(p.grad for p in self._parameters if p.grad is not None)]
        return any(is_part(tensor) for tensor in tensors) or any(is_aliased(p) for p in self._parameters)

    # Trials may run in inference mode. Tensors allocated there could never be trained again.

    @torch.inference_mode(False)
    def lay(self) -> None:
        """Has the weights be in channels_last, until :meth:`show`."""
        for parameter in self._parameters:
            converted = in_format(parameter.data, self._format)
            if converted.stride() == parameter.stride():
                continue  # it is, or it is tied to a weight of another convolution, which keeps the strides
            self.strides[parameter] = parameter.stride()
            parameter.data = converted
            _match_gradient(parameter)

    @torch.inference_mode(False)
    def show(self) -> None:
        """Has the weights be in the user's layout, for code that looks at them between steps."""
        for parameter, stride in self.strides.items():
            if not is_part(parameter):  # a step has made it one
                parameter.data = with_strides(parameter.data, stride)
            _match_gradient(parameter)
        self.strides.clear()

    @override
    def _apply(self) -> None:
        self._is_held = False
        if self._has_method:
            self._method.apply()
        if has_ranks():  # DistributedDataParallel lays its buckets out by what it finds
            self.lay()

    @override
    def _undo(self) -> None:
        self._method.undo()
        self.show()


def is_part(tensor: Tensor) -> bool:
    """Returns whether a tensor is a part of a larger buffer, which would not follow it into another layout."""
    return tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes


def is_aliased(tensor: Tensor) -> bool:
    """Returns whether anything else references a tensor's memory: ``tensor.data`` or a state_dict somebody keeps."""
    return handles_on_storage(tensor.untyped_storage()) > 2  # the tensor, and the storage that is asked


def _match_gradient(parameter: nn.Parameter) -> None:
    if parameter.grad is not None and parameter.grad.layout == torch.strided:
        parameter.grad.data = with_strides(parameter.grad.data, parameter.stride())


class OptimizerLayouts:
    """Keeps optimizer states in the layout of their parameters.

    Fused optimizers go through parameter and state by memory address. If the strides differ, they update the wrong
    elements, without an error (``AdamW(fused=True)`` on CPU, torch 2.13). A watched optimizer is matched when it loads
    a state, since a checkpoint may come from a contiguous run. Call :meth:`match` after weights change their layout.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = set(parameters)
        self._hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle | None] = weakref.WeakKeyDictionary()

    def watch(self, optimizer: Optimizer) -> bool:
        """Watches an optimizer. Returns whether it is new and holds some of the parameters."""
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if optimizer in self._hooks or not any(parameter in self._parameters for parameter in held):
            return False
        self._match_one(optimizer)
        self._hooks[optimizer] = None
        # A wrapper may skip super().__init__() and then has no hooks. The wrapped optimizer has them.
        with suppress(AttributeError):
            # A loaded state has the layouts of the run that saved it.
            self._hooks[optimizer] = optimizer.register_load_state_dict_post_hook(self._match_one)
        return True

    def match(self) -> None:
        """Matches the states of all watched optimizers to the layouts of their parameters."""
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
    """Returns why an optimizer may fail or go wrong with another layout; None if it is known to be safe.

    Torch's optimizers work element by element, except LBFGS, which calls ``.view(-1)`` on every gradient. Others are
    unknown: some Muons call ``grad.view(len(grad), -1)``, and 8-bit optimizers keep flat states.
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
    """Converts a checkpoint to the layouts of a run without this package, so that such a run can load it.

    The tensors in use are not changed.
    """
    state_dict = checkpoint["state_dict"]
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in strides and _belongs_to(state_dict.get(name), parameter):  # hooks may put anything there
            state_dict[name] = with_strides(state_dict[name], strides[parameter])
    for optimizer, saved in zip(optimizers, checkpoint.get("optimizer_states", ()), strict=False):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = saved.get("state", {})  # optimizers of other libraries may save anything
        for index, parameter in enumerate(parameters):
            if parameter in strides and isinstance(state := states.get(index), dict):
                # A new dict, since the one in the checkpoint belongs to the optimizer.
                states[index] = {
                    key: with_strides(value, strides[parameter]) if _belongs_to(value, parameter) else value
                    for key, value in state.items()
                }


def _belongs_to(value: Any, parameter: Tensor) -> bool:
    # Other classes, as states in 8 bits, have their elements in tensors of their own.
    return type(value) in (Tensor, type(parameter)) and value.shape == parameter.shape
