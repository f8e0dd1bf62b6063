"""Optimizer states in 8 bits: the moments of torch's Adam and AdamW take a quarter of the memory between steps.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), https://arxiv.org/abs/2110.02861, with the
tensors of torchao, https://github.com/pytorch/ao/tree/main/torchao/optim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.adam import adam
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_accel.core.measured import Measurement
from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.core.torchao import why_missing
from lightning_accel.memory import eight_bits
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import Forecast, TechniqueContext

Optimizer8bitSetting = Literal["off", "on"]

CHUNK_ELEMENTS = 1 << 22
"""Parameters that are stepped together: only their states are in floats at a time."""

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}  # and whether they can be negative
_OPTIONS = ("lr", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize", "foreach", "fused")


def why_not(optimizer: Optimizer) -> str | None:
    """Why the states of an optimizer are left alone; None where some of them can be kept in 8 bits."""
    name = type(optimizer).__name__
    if "__getstate__" in vars(optimizer):
        return "already in 8 bits"
    if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(Adam.step):
        return f"{name} does not step as torch's Adam and AdamW do, whose moments are known"
    for group in optimizer.param_groups:
        option = next((option for option in ("capturable", "differentiable") if group[option]), None)
        if option is not None:
            return f"{name}({option}=True) wants its states where they are"
    if not any(_takes(parameter, group) for group in optimizer.param_groups for parameter in group["params"]):
        return f"no parameter of {eight_bits.LEAST_ELEMENTS:,} elements or more, in float32 or bfloat16 and unsharded"
    return None


def _takes(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    is_plain = type(parameter) in (nn.Parameter, Tensor) and not (group["capturable"] or group["differentiable"])
    return is_plain and eight_bits.is_possible(parameter)


class EightBitStates(Patch):
    """Keeps the moments of one Adam in 8 bits, and gives everybody else floats.

    The optimizer stays what it is. Within its own ``step``, large parameters are stepped first, by torch's function and
    the options of their groups, a few at a time with their states in floats; its own code then finds no gradient of
    them. What it saves, and what is copied or pickled of it, has floats. It is one that :func:`why_not` has nothing
    against.
    """

    def __init__(self, site: str, optimizer: Optimizer, run: TechniqueContext) -> None:
        super().__init__(site, "moments → 8 bits")
        self._optimizer = optimizer
        self._run = run
        self._handles: list[RemovableHandle] = []
        self._copies = MethodPatch(site, "with floats", optimizer, "__getstate__", _with_floats)
        self._set_aside: list[tuple[Tensor, Tensor]] = []
        self._steps = 0
        self._errors = eight_bits.Errors()

    @override
    def _apply(self) -> None:
        optimizer = self._optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(_floats_in),
            optimizer.register_load_state_dict_post_hook(self._pack),
        ]
        self._copies.apply()
        self._pack(optimizer)

    @override
    @torch.inference_mode(False)
    def _undo(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._copies.undo()
        for parameter in self._optimizer.state:
            self._give_back(parameter)

    # -- a step --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Has ours stepped where the optimizer asks for the loss: after all hooks, and with its gradients there."""
        given: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._set_aside.clear()  # of a step that raised

        def closure() -> Any:
            loss = None if given is None else given()
            with torch.no_grad():
                self._step()
            return loss

        return (optimizer,), {"closure": closure}

    def _after_step(self, *_: Any) -> None:
        for parameter, gradient in self._set_aside:
            parameter.grad = gradient
        self._set_aside.clear()

    def _step(self) -> None:
        self._steps += 1
        self._errors.begin(self._steps)
        for group in self._optimizer.param_groups:
            ours = []
            for parameter in group["params"]:
                if not _takes(parameter, group):
                    self._give_back(parameter)
                elif parameter.grad is not None and parameter.grad.layout == torch.strided:
                    ours.append(parameter)
            for chunk in _chunks(ours):
                self._step_together(chunk, group)
            for parameter in ours:
                self._set_aside.append((parameter, parameter.grad))
                parameter.grad = None
        if (line := self._errors.line(self._steps)) is not None:
            packed, floats = state_bytes(self._optimizer)
            self._run.measured = Measurement(original_bytes=floats, candidate_bytes=packed)
            sizes = f"{packed / 2**20:,.1f} MiB instead of {floats / 2**20:,.1f}"
            self._run.status = f"in force: states take {sizes}; {line}"

    def _step_together(self, parameters: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        states = [self._state(parameter, group) for parameter in parameters]
        floats = [_floats_of(state, parameter) for state, parameter in zip(states, parameters, strict=True)]
        options = {name: group[name] for name in _OPTIONS}
        options["beta1"], options["beta2"] = group["betas"]
        self._errors.before(self._optimizer, parameters, floats, group)
        adam(
            list(parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [moments["exp_avg"] for moments in floats],
            [moments["exp_avg_sq"] for moments in floats],
            [moments["max_exp_avg_sq"] for moments in floats if group["amsgrad"]],
            [state["step"] for state in states],
            grad_scale=getattr(self._optimizer, "grad_scale", None),  # set by torch's gradient scaler, for fused ones
            found_inf=getattr(self._optimizer, "found_inf", None),
            **options,
        )
        for state, moments in zip(states, floats, strict=True):
            for name, values in moments.items():
                eight_bits.write(state[name], values)
        self._errors.after(parameters, states, floats)

    def _state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """What there is of a parameter, in 8 bits, after it was made as torch makes it where there was nothing."""
        state: dict[str, Any] = self._optimizer.state[parameter]
        if not state:
            is_wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
            device = parameter.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float64 if is_wide else torch.float32, device=device)
        for name, signed in _MOMENTS.items():
            if name not in state and (name != "max_exp_avg_sq" or group["amsgrad"]):
                state[name] = eight_bits.zeros_like(parameter, signed=signed)
        _pack_state(state, parameter)  # somebody may have put floats there
        return state

    # -- states --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _pack(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state and _takes(parameter, group):
                    _pack_state(optimizer.state[parameter], parameter)

    def _give_back(self, parameter: Tensor) -> None:
        if parameter in self._optimizer.state:
            state = self._optimizer.state[parameter]
            state.update(_floats_of(state, parameter))


def _pack_state(state: dict[str, Any], parameter: Tensor) -> None:
    for name, signed in _MOMENTS.items():
        value = state.get(name)
        if isinstance(value, Tensor) and not eight_bits.is_packed(value):
            state[name] = eight_bits.zeros_like(parameter, signed=signed)
            eight_bits.write(state[name], value)


def _floats_of(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The moments of a state that are in 8 bits, in floats."""
    packed = {name: value for name, value in state.items() if eight_bits.is_packed(value)}
    with torch.no_grad():
        return {name: eight_bits.read(value, parameter) for name, value in packed.items()}


def _floats_in(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer saves, as a plain one would: its dict of states is its own, and stays as it is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        index: {**state, **_floats_of(state, parameters[index])} if isinstance(index, int) else state
        for index, state in saved["state"].items()
    }
    return saved | {"state": states}


def _with_floats(original: Callable[..., Any]) -> Callable[..., Any]:
    def getstate(self: Optimizer) -> dict[str, Any]:
        kept: dict[str, Any] = original(self)
        states = type(self.state)(dict)  # torch's own: a defaultdict
        states.update({p: {**state, **_floats_of(state, p)} for p, state in self.state.items()})
        return {**kept, "state": states}

    return getstate


def _chunks(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for parameter in parameters:
        if chunk and sum(p.numel() for p in chunk) + parameter.numel() > CHUNK_ELEMENTS:
            yield chunk
            chunk = []
        chunk.append(parameter)
    if chunk:
        yield chunk


def state_bytes(optimizer: Optimizer) -> tuple[int, int]:
    """What the moments of an optimizer take, and what they would in floats."""
    packed = floats = 0
    for state in optimizer.state.values():
        for name in _MOMENTS.keys() & state.keys():
            value = state[name]
            packed += eight_bits.packed_bytes(value) if eight_bits.is_packed(value) else value.nbytes
            floats += value.numel() * value.dtype.itemsize
    return packed, floats


# The optimizer's own options are read at every step: whoever sets them may come before or after.
@register(
    "optimizer_8bit",
    options=Optimizer8bitSetting,
    default="off",
    doc=(
        '``"on"`` keeps the moments of torch\'s Adam and AdamW in 8 bits while the run lasts, by torchao; it '
        'changes training, and the report says by how much. Checkpoints have floats. ``"off"``.'
    ),
    after="memory_format",
    exactness="changes training",
)
class Optimizer8bit(Technique):
    """Keeps the moments of torch's Adam and AdamW in 8 bits, where parameters are large enough."""

    traits = Traits(
        trial_step=None,
        remembers=False,
        edits_optimizers=True,
        not_on={kind: f"not measured on {kind}" for kind in ("mps", "xla")},
        why_not_sharded="its blocks of 256 elements were not tried on shards",
        lacks=lambda host: why_missing(eight_bits.MODULE),
    )

    def __init__(self, settings: Optimizer8bitSetting, context: BuildContext) -> None:
        words = "the moments of torch's Adam and AdamW, where torchao is installed"
        self.run.forecast = Forecast(True, "yes", words)

    @override
    def optimizer_sites(self, optimizers: Mapping[str, Optimizer]) -> Iterable[Patch]:
        for site, optimizer in optimizers.items():
            reason = why_not(optimizer)
            yield Site(site, why_not=reason) if reason else EightBitStates(site, optimizer, self.run)
