"""Optimizer steps: torch's own optimizers step all parameters of a group together, in one kernel or in a few.

https://docs.pytorch.org/docs/stable/optim.html#algorithms
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accel.core import stepping
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch
from lightning_accel.core.stepping import Group, StepImpl
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.step_override import StandInSteps
from lightning_accel.techniques.syncfree_steps import step_syncfree
from lightning_accel.techniques.technique_context import Forecast, TechniqueContext, Verdict

OptimizerSetting = Literal["auto", "off", "foreach", "fused"]

SMALL = 1 << 16
"""Elements: parameters that are larger on average gain nothing by foreach on a CPU, where it makes temporary copies."""


def step_together(
    site: str, optimizer: Optimizer, setting: OptimizerSetting = "auto", run: TechniqueContext | None = None
) -> list[Patch]:
    """The patch by which an optimizer steps by another implementation; the groups left out, with the reason."""
    kind = stepping.kind_of(optimizer)
    if isinstance(kind, str):
        return [Site(site, why_not=kind)]
    if any(is_lazy(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        return [Site(site, why_not="has lazy parameters: run the model once before, and they will be there")]
    impls: dict[StepImpl, None] = {}
    refusals = []
    for index, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            continue
        found = _ways(kind, group, setting)
        possible = [impl for impl in found if stepping.why_never(kind, group, impl) is None]
        impls |= dict.fromkeys(possible)
        if not possible:
            reason = stepping.why_never(kind, group, found[0]) if found else _nothing_to_gain(kind, group, setting)
            where = f"{site}, group {index}" if len(optimizer.param_groups) > 1 else site
            refusals.append(Site(where, why_not=stepping.own_choice(group) or reason or ""))
    patches = [StepsTogether(site, optimizer, kind, list(impls), run or TechniqueContext())] if impls else []
    return [*patches, *refusals]


def _ways(kind: type[Optimizer], group: Group, setting: OptimizerSetting) -> list[StepImpl]:
    """Those that could gain something, the most promising first."""
    impls: list[StepImpl] = []
    devices = {parameter.device.type for parameter in group["params"]}
    is_auto = setting == "auto"
    if is_auto and stepping.is_one_operation(kind, group):
        return []
    if setting != "foreach":
        impls += ["fused"] if all(stepping.has_fused(kind, p.device.type, p.dtype) for p in group["params"]) else []
    # On GPUs it needs memory for temporary copies, which a run may not have.
    if setting == "foreach" or (is_auto and devices == {"cpu"} and _mean_size(group) <= SMALL):
        impls += ["foreach"]
    return [impl for impl in impls if stepping.knows_distributed(kind, group, impl)]


def _mean_size(group: Group) -> float:
    sizes: list[int] = [parameter.numel() for parameter in group["params"]]
    return sum(sizes) / max(1, len(sizes))


def _nothing_to_gain(kind: type[Optimizer], group: Group, setting: OptimizerSetting) -> str:
    devices = {parameter.device.type for parameter in group["params"]}
    if setting == "foreach":
        return f"torch has no foreach step of {kind.__name__} for distributed parameters"
    if setting == "auto" and stepping.is_one_operation(kind, group):
        return "its step is one addition, which nothing makes less"
    if not stepping.knows_distributed(kind, group, "fused"):
        why = f"torch has no fused step of {kind.__name__} for distributed parameters"
    else:
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in group["params"]}
        on, of = (" and ".join(sorted(names)) for names in (devices, dtypes))
        why = f"torch has no fused step of {kind.__name__} on {on} in {of} that is right"
    if setting == "fused":
        return why
    if devices == {"cpu"}:
        return f"{why}, and foreach gains nothing with parameters of {_mean_size(group):,.0f} elements on average"
    takes_it = stepping.is_foreach_by_itself(group)
    return f"{why}, and {'torch takes foreach there by itself' if takes_it else 'foreach takes more memory'}"


class StepsTogether(StandInSteps):
    """Has an optimizer step by another implementation of torch's: its stand-in alone has the flags for that.

    Where a group cannot be stepped so in some step, the user's own implementation steps it, and the notes say so. The
    first of ``impls`` is in force once the patch is applied.
    """

    def __init__(
        self, site: str, optimizer: Optimizer, kind: type[Optimizer], impls: list[StepImpl], run: TechniqueContext
    ) -> None:
        super().__init__(site, f"{kind.__name__} → {' or '.join(impls)}", optimizer, kind)
        self.variants = tuple(impls)
        self._run = run
        self._impl = impls[0]
        self._reasons: dict[str, None] = {}  # that were told, in their order
        self._form: Any = None  # in which all groups were found ready; None if not all were

    @override
    def switch(self, variant: str) -> None:
        self.undo()
        self._form = None
        self._impl = next((impl for impl in get_args(StepImpl) if impl == variant), self._impl)
        super().switch(variant)

    @property
    @override
    def settle(self) -> int:  # type: ignore[override]
        # On a GPU, fused kernels keep the counts of steps there: a switch copies states between devices.
        groups = self._optimizer.param_groups
        return "fused" in self.variants and any(p.device.type != "cpu" for group in groups for p in group["params"])

    @override
    def _groups(self, optimizer: Optimizer) -> Iterator[Group]:
        form = stepping.form_of(optimizer)
        is_known = form is not None and form == self._form
        self._form = form
        for group in optimizer.param_groups:
            if is_known:
                reason = stepping.why_never(self._kind, group, self._impl)
            else:
                reason = stepping.make_ready(self._kind, group, optimizer.state, self._impl)
                self._form = self._form if reason is None else None
            if reason is not None and reason not in self._reasons and stepping.own_choice(group) is None:
                self._tell(reason)
            yield {**group, self._impl: True} if reason is None else group

    def _tell(self, reason: str) -> None:
        self._reasons[reason] = None
        words = f"{self.change}, a group in the user's way in steps where {'; where '.join(self._reasons)}"
        self._run.revise(self.site, Verdict("kept", words))

    @override
    def _own_states(self, group: Group, states: Mapping[Any, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        if stepping.own_choice(group) is None:
            for parameter, step in stepping.own_steps(group, states):
                yield parameter, {**states[parameter], "step": step}


@register(
    "optimizer",
    options=OptimizerSetting,
    default="auto",
    doc=(
        '``"fused"``: all parameters of a group in one kernel; ``"foreach"``: each operation on all of them '
        "at once; ``\"auto\"`` tries what may gain on the run's own steps, keeps the fastest, and takes torch_xla's "
        'steps under XLA; ``"off"``. Groups for which the user has chosen ``foreach``, ``fused``, '
        "``capturable`` or ``differentiable`` are left as they are."
    ),
    after="memory_format",
    exactness="rounding",
)
class OptimizerSteps(Technique):
    """Has torch's own optimizers take fused or foreach steps; checkpoints and the user's flags stay as they are."""

    traits = Traits(trial_step=None, remembers=False, edits_optimizers=True)

    def __init__(self, settings: OptimizerSetting, context: BuildContext) -> None:
        self._setting, kind = settings, context.host.kind
        self._is_xla = kind == "xla"
        if self._setting != "auto":
            self.run.forecast = Forecast(True, "yes", f"{self._setting} steps of torch's own optimizers")
        elif self._is_xla:
            self.run.forecast = Forecast(True, "yes", "Adam, AdamW and SGD with momentum take torch_xla's steps")
        else:
            impls = "fused and foreach steps" if kind == "cpu" else "fused steps"
            self.run.forecast = Forecast(True, "tried", f"{impls} of torch's own optimizers are tried")

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind == "xla" and self._setting != "auto":
            return f"torch has no {self._setting} steps for XLA: techniques.optimizer='auto' takes those of torch_xla"
        if host.kind not in ("cpu", "cuda", "rocm", "xla"):
            return f"not measured on {host.kind} yet: give torch's optimizers fused=True or foreach=True to try it"
        return None

    @override
    def optimizer_sites(self, optimizers: Mapping[str, Optimizer]) -> Iterator[Patch]:
        # Where each rank decides alone, their parameters would drift apart, by rounding.
        if self._setting == "auto" and not self._is_xla and not self.run.decides_alone:
            self.run.live = Live(loses_little=True)
        for site, optimizer in optimizers.items():
            if self._is_xla:
                yield step_syncfree(site, optimizer)
            else:
                yield from step_together(site, optimizer, self._setting, self.run)
