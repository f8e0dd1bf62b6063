"""A memory budget: what each block does, keep, recompute or offload, is planned so that a training step fits."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_accel.core.byte_size import format_bytes, parse_bytes
from lightning_accel.core.host import Host
from lightning_accel.core.options import Options, Rule
from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.memory.costs import Policy
from lightning_accel.memory.meter import device_memory_bytes
from lightning_accel.memory.offload import Offloading
from lightning_accel.memory.planner import Planner, State
from lightning_accel.memory.recompute import trained_patch
from lightning_accel.memory.schedule import FixedMemory, MemorySchedule
from lightning_accel.techniques.base import BuildContext
from lightning_accel.techniques.gradient_checkpointing.technique import GradientCheckpointing
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.technique_context import Verdict

_AMOUNT = Rule("an amount such as '12GiB' or '40%'", functools.partial(parse_bytes, fractions=True))
Budget = Literal["off"] | Annotated[int | float | str, _AMOUNT]


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryBudgetOptions(Options, owner="memory.budget"):
    """What ``MemoryOptions(budget=, blocks=)`` comes to."""

    budget: Budget = "off"
    blocks: tuple[str, ...] = ()


_DOES: dict[Policy, str] = {
    "keep": "keeps its activations: they fit",
    "selective": "forward → checkpointed (selective)",
    "full": "forward → checkpointed (full)",
    "offload": "activations offloaded",
    "full+offload": "forward → checkpointed (full), arguments offloaded",
}


def _conflicts(settings: MemoryBudgetOptions, all_settings: Mapping[str, Any], verify: bool) -> None:
    checkpointing, compiled = all_settings["gradient_checkpointing"].mode, all_settings["compile"]
    if checkpointing != "off":
        raise ValueError(
            f"memory.budget={settings.budget!r} with memory.checkpoint={checkpointing!r}: a budget plans what"
            " each block does itself. Give one of the two."
        )
    if compiled != "off":
        raise ValueError(
            f"memory.budget={settings.budget!r} with compile={compiled!r}: the planner measures blocks as they run"
            " eagerly, and changes what they do. Give compile='off', or memory.checkpoint='selective' or"
            " 'full' in place of the budget."
        )


@register(
    "memory_budget", options=MemoryBudgetOptions, after="gradient_checkpointing", before="compile", exactness="exact"
)
class MemoryBudget(GradientCheckpointing):
    """Fits a training step into a budget: ``memory="12GiB"``."""

    traits = replace(
        GradientCheckpointing.traits,
        remembers=False,  # a plan is for a batch, a device and a precision, and found again in a few steps
        not_on={
            **GradientCheckpointing.traits.not_on,
            "mps": "memory is metered on CPUs, NVIDIA and AMD GPUs only, so that no budget could be kept. Use"
            " memory.checkpoint='selective' or 'full'",
        },
        why_not_sharded="the planner runs single blocks, which all ranks would have to gather together; use"
        " memory.checkpoint='full' or 'selective'",
        acts_without_sites=True,  # in a roomy budget every block stays as it is
        conflicts=_conflicts,
        oom_fallbacks=lambda settings, context: (),  # its plan has done what it could
    )

    def __init__(
        self, plan: MemoryBudgetOptions, offloading: Offloading | None, device: torch.device, *, verify: bool = True
    ) -> None:
        super().__init__("selective", plan.blocks)
        self._asked = "budget", plan.budget
        self._verify = verify
        # What a block has packed away is no longer counted as held, and still must not be changed.
        self.run.protects = {"": "with a memory budget: what its plan packs away must stay as it is"}
        self._plan = plan
        self._offloading = offloading
        self._device = device
        self._planner: Planner | None = None
        self._told: State | None = None
        self._refusals: Counter[str] = Counter()

    @classmethod
    @override
    def from_settings(cls, settings: MemoryBudgetOptions, context: BuildContext) -> Self:
        offloading = context.settings["activation_offloading"].on(context.device.type)
        return cls(settings, offloading, context.device, verify=context.verify)

    @property
    def memory_schedule(self) -> MemorySchedule | None:
        """What was decided; None until then."""
        return None if self._planner is None else self._planner.state.schedule

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        self.run.verify = True  # what nobody verifies is measured all the same
        budget = budget_bytes(self._plan, self._device)
        fixed = FixedMemory.of(model)
        if fixed.total > budget:
            raise ValueError(
                f"memory.budget={self._plan.budget!r}: {format_bytes(budget)} do not hold the"
                f" model itself. Parameters, gradients and buffers are {format_bytes(fixed.total)} ({fixed.total}"
                " bytes), and the optimizer's state and activations come on top. Give a larger budget."
            )
        self._planner = Planner(model, self._find_blocks(model), budget, self._device, self._offloading)
        self.run.at_end.callback(self._planner.close)
        return super().sites(model, host)

    @override
    def optimizer_sites(self, optimizers: Mapping[str, Optimizer]) -> Iterable[Patch]:
        assert self._planner is not None
        for optimizer in optimizers.values():
            self._planner.optimizers.watch(optimizer)
        return ()

    @override
    def _edit(self, site: str, block: nn.Module) -> MethodPatch:
        assert self._planner is not None
        return trained_patch(site, "what it does is planned", block, functools.partial(self._planner.run, site))

    @override
    def _judge(self, patch: MethodPatch, args: Any, kwargs: Any) -> Verdict:
        verdict = self._try(patch, args, kwargs) if self._verify else Verdict("kept")
        if not verdict.keep:
            self._refusals[verdict.reason] += 1
        elif self._planner is not None:
            self._planner.learn(patch.site, self._blocks[patch.site], patch.original, args, kwargs)
        return verdict

    @override
    @contextmanager
    def step(self, stage: str) -> Iterator[None]:
        planner = self._planner
        assert planner is not None
        planner.agree = self.run.agree
        planner.enter(is_training=stage == "train" and torch.is_grad_enabled())
        self._tell(planner)
        with super().step(stage), planner.around_step():
            yield

    def _tell(self, planner: Planner) -> None:
        """Puts what is new into what the engine reads."""
        state, offloader = planner.state, planner.offloader
        if offloader is not None:
            for complaint in offloader.complaints:
                self.run.warn(complaint)
            offloader.complaints.clear()
        if state is self._told:
            return
        self._told = state
        if state.remark:
            self.run.warn(state.remark)
        if state.gave_up:
            why = next((f": {reason}" for reason, _ in self._refusals.most_common(1)), "")
            self.run.status = f"{state.gave_up}{why}"
            self.run.warn(f"memory.budget: {self.run.status}")
        elif state.schedule is None:
            self.run.status = "planning: the first training steps recompute every block"
        else:
            self._report(state.schedule)

    def _report(self, schedule: MemorySchedule) -> None:
        policies = ", ".join(f"{count} {policy}" for policy, count in Counter(schedule.policies.values()).items())
        peak, word = schedule.measured_peak_bytes, "measured"
        if peak is None:
            peak, word = schedule.predicted_peak_bytes, "predicted"
        self.run.status = f"peak {format_bytes(peak)} ({word}) of {format_bytes(schedule.budget_bytes)}: {policies}"
        self.run.details = schedule.table()
        for site, policy in schedule.policies.items():
            self.run.revise(site, Verdict("refused" if policy == "keep" else "kept", _DOES[policy]))


def budget_bytes(plan: MemoryBudgetOptions, device: torch.device) -> int:
    """The budget of ``plan`` in bytes of ``device``."""
    amount = parse_bytes("memory_budget", plan.budget, fractions=True)
    return amount if isinstance(amount, int) else int(amount * device_memory_bytes(device))
