"""Results of earlier runs: of the module, from its checkpoint, and of the program, from this process and from files."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.compiled import is_compiled
from lightning_accel.core.host import Host
from lightning_accel.core.purse import SHARE
from lightning_accel.core.torch_private.compilation import compiling_ms
from lightning_accel.core.tree import tensors_in
from lightning_accel.experiment.python_pace import python_pace
from lightning_accel.experiment.store import Key
from lightning_accel.lightning.packages import LightningModule
from lightning_accel.settings import Plan
from lightning_accel.technique_run import Decisions
from lightning_accel.techniques.technique_context import Verdict
from lightning_accel.tuning import verdict_cache
from lightning_accel.tuning.model_fingerprint import described
from lightning_accel.tuning.tuning_result import Tuning
from lightning_accel.tuning.verdict_cache import Known, program_key

_MOST = 256  # programs; above this number all are forgotten


@dataclass
class RunState:
    """Results of earlier runs of a module.

    Attributes:
        decisions: The verdicts on its sites, from steps with gradients.
        decisions_without_gradients: Those from steps without gradients, which do not hold for the others.
        tuning: The settled results of the live trials.
        put_on: The techniques put on after a lack of memory: names and settings.
    """

    decisions: Decisions = field(default_factory=dict)
    decisions_without_gradients: Decisions = field(default_factory=dict)
    tuning: Tuning | None = None
    put_on: list[tuple[str, Any]] = field(default_factory=list)
    _module: weakref.ref[nn.Module] | None = None

    @property
    def is_decided(self) -> bool:
        """Whether an earlier run of the module, or the checkpoint from which this run resumes, has decided."""
        return self.tuning is not None or bool(self.decisions or self.put_on)

    def be_of(self, module: nn.Module) -> None:
        """Forgets everything if the state belongs to another module."""
        if self._module is None or self._module() is not module:
            vars(self).update(vars(RunState()))
            self._module = weakref.ref(module)

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as plain values, for a checkpoint, without empty entries."""
        found = {
            "decisions": {
                technique: {site: verdict.to_dict() for site, verdict in verdicts.items()}
                for technique, verdicts in self.decisions.items()
            },
            "out_of_memory": self.put_on,
            "tuning": None if self.tuning is None else self.tuning.to_dict(),
        }
        return {name: value for name, value in found.items() if value}

    def load(self, state: Mapping[str, Any]) -> Decisions:
        """Loads a state of :meth:`to_dict`. Returns its decisions, which a run in progress must carry out."""
        self.put_on = [(name, settings) for name, settings in state.get("out_of_memory", ())]
        if "tuning" in state:
            self.tuning = Tuning.from_dict(state["tuning"])
        return {
            technique: {site: Verdict.from_dict(one) for site, one in verdicts.items()}
            for technique, verdicts in state.get("decisions", {}).items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": None}  # a copy or another process does not have this module


@dataclass
class Met:
    """The knowledge of one program.

    Attributes:
        held: A description of the module's contents before its first step, and the shapes of its first batch.
        step_s: Seconds of a plain step.
        opening_s: Seconds to start the plan; 0.0 if the run ended before.
        tuning: The settled results of live trials.
    """

    held: tuple[str, Any]
    step_s: float
    opening_s: float = 0.0
    tuning: Tuning | None = None


PROGRAMS: dict[Any, Met] = {}
"""The known programs, by :func:`signature_of`."""


def signature_of(module: LightningModule, plan: Plan) -> Any:
    """Returns a cheap signature that separates programs of this process: classes, parameters, plan."""
    if len(PROGRAMS) > _MOST:
        PROGRAMS.clear()
    kinds = tuple(type(part) for part in module.modules())
    shapes = tuple((p.shape, p.dtype) for p in module.parameters() if not torch.nn.parameter.is_lazy(p))
    trainer = module.trainer
    terms = torch.get_num_threads(), module.device, type(trainer.strategy), trainer.accumulate_grad_batches
    return kinds, shapes, terms, plan


class Program:
    """A module on which a run carries out a plan, with what earlier runs tell about it.

    Attributes:
        module: The module.
        host: The machine.
        plan: The settings.
        kept: The results of earlier runs of the module.
        key: The key in the cache of verdicts, once a fit that began plain has looked it up.
        known: The cache's entry.
        earlier: The tuning that an earlier fit of this program in this process has settled.
    """

    def __init__(self, module: LightningModule, host: Host, plan: Plan, kept: RunState) -> None:
        self.module, self.host, self.plan, self.kept = module, host, plan, kept
        self.key: Key | None = None
        self.known: Known | None = None
        self.earlier: Tuning | None = None
        self._compiling_ms = compiling_ms()
        self._signature: Any = None
        self._held = ""  # a description of the module's contents before the first step changes them
        self._first: list[Tensor] = []  # the first batch as meta tensors

    def meet(self, batch: Any) -> Met | None:
        """Notes the shapes of the first batch. Returns this process's knowledge of programs with this signature."""
        tensors = [tensor for tensor in tensors_in(batch) if not tensor.is_nested]
        self._first = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]
        self._signature = signature_of(self.module, self.plan)
        return PROGRAMS.get(self._signature)

    def describe(self) -> None:
        """Describes the module's contents, which distinguish its program from others of the same signature."""
        self._held = described(self.module)

    def met(self) -> Met | None:
        """Returns this process's knowledge of exactly this program, or None."""
        met = PROGRAMS.get(self._signature)
        if met is None or met.held != self._whole:
            return None
        self.earlier = met.tuning and replace(copy.deepcopy(met.tuning), is_earlier=True)
        return met

    def is_too_short(self, met: Met, steps: float) -> bool:
        """Returns whether so many steps can never pay for a start, even if steps take twice as long as expected."""
        now, then = (sum(shape.numel() for shape, _ in shapes) for shapes in (self._whole[1], met.held[1]))
        larger: float = max(1.0, now / max(1, then))
        return 2 * larger * SHARE * steps * met.step_s < (met.opening_s or self.opening_s)

    @functools.cached_property
    def opening_s(self) -> float:
        """Estimated seconds to start the plan, with the slower first steps after that, by the number of modules.

        The trials of techniques are not included. Compiled modules are compiled once more, for another number format.
        """
        modules = list(self.module.modules())
        is_first = not any(met.opening_s for met in PROGRAMS.values())  # imports happen once in a process
        compiling_s = (compiling_ms() - self._compiling_ms) / 1e3 if any(map(is_compiled, modules)) else 0.0
        return python_pace() * (0.013 * is_first + 0.013 + 0.00012 * len(modules)) + compiling_s

    @property
    def _whole(self) -> tuple[str, Any]:
        return self._held, tuple((tensor.shape, tensor.dtype) for tensor in self._first)

    @property
    def has_no_past(self) -> bool:
        """Whether no earlier run can have left anything for it: one that is too short then has nothing to look up."""
        return not (self._held or self.kept.is_decided or self.earlier)

    @property
    def tuning(self) -> Tuning | None:
        """Returns the settled results of an earlier run: of this module, of this program, or of a similar one."""
        of_program = None if self.known is None else self.known.tuning
        return self.kept.tuning or of_program or self.earlier

    def recall(self) -> None:
        """Looks the program up in the cache of verdicts."""
        if self.key is None and not self.kept.is_decided:
            if self._held:
                self.key = self.key_with(self._first, self._held)
            self.known = None if self.key is None else verdict_cache.recall(self.key)

    def key_with(self, batch: Any, held: str | None = None) -> Key | None:
        """Returns the key of the program whose first batch this is. None if it has no key."""
        trainer = self.module.trainer
        settings = f"{self.plan!r}, {trainer.world_size} ranks, {type(trainer.strategy)}"
        return program_key(self.module, batch, self.host.described, settings, held)

    def restart(self, settled: Tuning) -> None:
        """Makes ``settled`` the only known results."""
        self.kept.tuning, self.known, self.earlier = None, None, settled

    def remember(self, step_s: float | None, opening_s: float) -> None:
        """Stores the seconds of a plain step and of the start when the plan starts."""
        if self._signature is not None and step_s is not None:
            PROGRAMS[self._signature] = Met(self._whole, step_s, opening_s, self.tuning)

    def end(self, step_s: float | None, settled: Tuning | None) -> None:
        """Stores the settled results of live trials and the seconds of a step, for the next fit of this program."""
        met = PROGRAMS.get(self._signature)
        if met is not None:
            met.tuning = copy.deepcopy(settled) or met.tuning
        elif self._signature is not None and step_s is not None:
            PROGRAMS[self._signature] = Met(self._whole, step_s)
