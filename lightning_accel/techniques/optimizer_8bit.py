"""Optimizer states in 8 bits: the moments of torch's Adam and AdamW take a quarter of the memory between steps.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), https://arxiv.org/abs/2110.02861, with the
tensors of torchao, https://github.com/pytorch/ao/tree/main/torchao/optim.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from typing_extensions import override

from lightning_accel.core.measured import Measurement
from lightning_accel.core.patch import Patch
from lightning_accel.core.stepping import Group, step_of
from lightning_accel.core.torchao import why_missing
from lightning_accel.memory import eight_bits
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.step_override import StandInSteps
from lightning_accel.techniques.technique_context import Forecast, TechniqueContext

Optimizer8bitSetting = Literal["off", "on"]

CHUNK_ELEMENTS = 1 << 22
"""Parameters that are stepped together: only their states are in floats at a time."""

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}  # and whether they can be negative


def why_not(optimizer: Optimizer) -> str | None:
    """Why the states of an optimizer are left alone; None where some of them can be kept in 8 bits."""
    name = type(optimizer).__name__
    if "__getstate__" in vars(optimizer):
        return "another run has edited it: undo that one first"
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


class EightBitStates(StandInSteps):
    """Keeps the moments of one Adam in 8 bits, and gives everybody else floats.

    Large parameters are stepped first, a few at a time, by torch's step on a stand-in that has their states in floats;
    the stand-in of the step itself has the others. The optimizer is one that :func:`why_not` has nothing against.
    """

    yields_to_compilers = False  # which know nothing of 8 bits

    def __init__(self, site: str, optimizer: Optimizer, run: TechniqueContext) -> None:
        super().__init__(site, "moments → 8 bits", optimizer, type(optimizer))
        self._run = run
        self._steps = 0
        self._errors = eight_bits.Errors()

    @override
    def _apply(self) -> None:
        super()._apply()
        self._hooks.append(self._optimizer.register_load_state_dict_post_hook(self._pack))
        self._pack(self._optimizer)

    @override
    @torch.inference_mode(False)
    def _undo(self) -> None:
        super()._undo()
        # Also of parameters whose group the user has taken out, to add it again perhaps.
        self._give_back([{"params": [*self._optimizer.state]}])

    @override
    @torch.no_grad()
    def _groups(self, optimizer: Optimizer) -> list[Group]:
        """Steps the large parameters, and leaves the others to torch."""
        self._steps += 1
        self._errors.begin(self._steps)
        others = []
        for group in optimizer.param_groups:
            taken = {parameter for parameter in group["params"] if _takes(parameter, group)}
            self._give_back([{**group, "params": [p for p in group["params"] if p not in taken]}])
            ours = [p for p in group["params"] if p in taken and p.grad is not None and p.grad.layout == torch.strided]
            for chunk in _chunks(ours):
                self._step_together(chunk, group)
            stepped = set(ours)
            others.append({**group, "params": [p for p in group["params"] if p not in stepped]})
        if (line := self._errors.line(self._steps)) is not None:
            packed, floats = state_bytes(self._optimizer)
            self._run.measured = Measurement(original_bytes=floats, candidate_bytes=packed)
            sizes = f"{packed / 2**20:,.1f} MiB instead of {floats / 2**20:,.1f}"
            self._run.status = f"in force: states take {sizes}; {line}"
        return others

    def _step_together(self, parameters: list[Tensor], group: Group) -> None:
        held = {parameter: self._optimizer.state[parameter] for parameter in parameters}  # which may have one twice
        states = {parameter: {**state, **_floats_of(state, parameter)} for parameter, state in held.items()}
        self._errors.before(self._optimizer, [*held], [_moments_of(state) for state in states.values()], group)
        stand_in = object.__new__(self._kind)
        vars(stand_in).update(vars(self._optimizer), param_groups=[{**group, "params": parameters}], state=states)
        step_of(self._kind)(stand_in)
        for parameter, values in states.items():
            _pack_state(held[parameter], values, parameter)
        self._errors.after([*held], [*held.values()], [_moments_of(state) for state in states.values()])

    @torch.no_grad()
    def _pack(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state and _takes(parameter, group):
                    _pack_state(optimizer.state[parameter], dict(optimizer.state[parameter]), parameter)

    @override
    def _own_states(self, group: Group, states: Mapping[Any, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for parameter in group["params"]:
            if floats := _floats_of(states.get(parameter, {}), parameter):
                yield parameter, {**states[parameter], **floats}


def _pack_state(state: dict[str, Any], values: Mapping[str, Any], parameter: Tensor) -> None:
    """Has a state hold these values, its moments in 8 bits."""
    for name, value in values.items():
        if name not in _MOMENTS or not isinstance(value, Tensor) or eight_bits.is_packed(value):
            state[name] = value
            continue
        if not eight_bits.is_packed(state.get(name)):
            state[name] = eight_bits.zeros_like(parameter, signed=_MOMENTS[name])
        eight_bits.write(state[name], value)


def _moments_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: state[name] for name in _MOMENTS if name in state}


def _floats_of(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The moments of a state that are in 8 bits, in floats."""
    packed = {name: value for name, value in state.items() if eight_bits.is_packed(value)}
    with torch.no_grad():
        return {name: eight_bits.read(value, parameter) for name, value in packed.items()}


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
