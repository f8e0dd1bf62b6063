"""Stands at a site and sends every call where it was decided to go: to the original, or to a backend."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.core.device import device_of
from lightning_accel.core.isolation import is_trial
from lightning_accel.core.ranks import has_ranks
from lightning_accel.core.report import one_line
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.core.tree import tensors_in
from lightning_accel.experiment.tolerance import Spread
from lightning_accel.techniques.flash_attention.backend_trial import ORIGINAL, Rehearsal, WatchedBackend
from lightning_accel.techniques.flash_attention.backends import Backend
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward
from lightning_accel.techniques.site import PausedPatch
from lightning_accel.techniques.technique_context import TechniqueContext, Verdict, Verdicts

_MAX_CLASSES = 16  # of one site that are decided by trial; beyond, the nearest of them decides


@dataclass
class Judge:
    """What the sites of one model share: what is tried at their calls, by the clock or not, and what came out."""

    run: TechniqueContext
    backends: dict[str, WatchedBackend] = field(default_factory=dict)  # in order of preference
    may_time: bool = True  # whether the clock decides between them
    untimed: tuple[str, ...] = ()  # names of sites at which it never does
    is_trial_step: bool = False  # in which sites are tried for the first time
    found: Verdicts = field(default_factory=dict)  # in that step
    timed: dict[tuple[Any, ...], Verdict] = field(default_factory=dict)  # of the first of sites that are alike
    spreads: defaultdict[tuple[Any, ...], dict[int, Spread]] = field(default_factory=lambda: defaultdict(dict))

    def goes_by_clock(self, site: AttentionSite) -> bool:
        """Whether a backend has to be faster than the original at this site."""
        if not (self.may_time and self.run.decides_by_clock) or site.is_named(self.untimed):
            return False
        return self.is_trial_step or not has_ranks()  # one rank of several decides nothing by the clock in mid-run

    def revise(self, site: str, verdict: Verdict) -> None:
        """Says what holds at a site from now on."""
        if self.is_trial_step:
            self.found[site] = verdict
        else:
            self.run.revise(site, verdict)


class Dispatch(PausedPatch):
    """Lets a site's calls go to backends. Undone, all go to the original: other techniques may stand on top of it.

    Backends are tried as the ``judge`` says.
    """

    def __init__(self, attention: AttentionSite, judge: Judge) -> None:
        super().__init__(attention.site, f"{attention.what} → fused", attention.module, self)
        self.attention = attention
        self.choices: dict[str, str] = {}  # class of shapes → the name of a backend, or "original"
        # Found in this step; in force from the next one, since this step's backward pass may recompute its forward and
        # must find the original.
        self.tried: dict[str, str] = {}
        self.is_open = False  # whether calls may go elsewhere than to the original yet
        self.is_refused = False  # whether none ever may
        self.is_paused = False  # whether none may in this step
        self.is_differentiated_twice = False  # by a gradient penalty: kernels have no second derivative
        self._judge = judge

    @override
    def _apply(self) -> None:
        if self.value is None:  # else it stands there still
            super()._apply()
        self.is_refused = False

    @override
    def _undo(self) -> None:
        self.is_refused = True

    @property
    def is_used(self) -> bool:
        """Whether some class of calls goes to a backend."""
        is_closed = not self.is_open or self.is_refused or self.is_paused
        return not is_closed and any(choice != ORIGINAL for choice in self.choices.values())

    def remove(self) -> None:
        """Takes the site's forward back; what was bound over it must be gone by then."""
        super()._undo()
        self.attention.close()

    def open(self, choices: Mapping[str, str]) -> None:
        """Opens the site, with these choices."""
        if self.is_differentiated_twice:
            why = "its gradients are differentiated again, which fused kernels do not support"
            self.refuse(Verdict("refused", why))
        else:
            self.choices.update(choices)
            self.is_open = True

    def adopt_tried(self) -> None:
        """Puts in force what was tried in the step before."""
        if self.is_open:
            self.choices.update(self.tried)
        self.tried = {}

    def refuse(self, verdict: Verdict) -> None:
        """Sends all calls to the original from now on."""
        self.is_refused = True
        self._judge.revise(self.site, verdict)

    # -- a call ------------------------------------------------------------------------------------------------

    def rebound(self, original: Forward) -> Forward:
        """The site's forward from now on."""
        dispatch = self

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A deep copy of the module (EMA, the oracle of a trial) is not the site. A compiler is to see the original.
            is_compiled = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
            if is_compiled or self is not dispatch.attention.module or dispatch.is_refused or dispatch.is_paused:
                return original(self, *args, **kwargs)
            return dispatch._route(original, args, kwargs)

        forward.is_fused = True  # type: ignore[attr-defined]
        return forward

    def _route(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes = shape_class(self.attention.module, args, kwargs)
        choice = self.choices.get(shapes)
        if choice is None and not is_trial():
            outputs = self._first_call(shapes, original, args, kwargs)
            return outputs if self.is_open else self._watch_gradients(outputs)
        backend = self._judge.backends.get(choice or ORIGINAL) if self.is_open else None
        if backend is None:  # the original was chosen, or, on another machine, what this one lacks
            return original(self.attention.module, *args, **kwargs)
        outputs, failure = self._attempt(backend, original, args, kwargs)
        if failure:
            self.refuse(Verdict("failed", f"failed in mid-run: {failure}"))
        elif reason := self.attention.given_up():
            self.refuse(Verdict("refused", reason))
        return outputs

    def _attempt(
        self,
        by: Backend | Rehearsal,
        original: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: StateSnapshot | None = None,  # restored for the original: a part of the call may have run
    ) -> tuple[Any, str]:
        """What a call returns, and why the original had to compute it; empty: it had not."""
        try:
            return self.attention.run(by, original, args, kwargs), ""
        except Exception as error:
            if type(error).__module__ == "torch.utils.checkpoint":  # which ends a recomputation by it
                raise
            # An error of the user's own code comes out of the original, as it always did.
            reason = one_line(getattr(error, "inner_exception", error))  # which Dynamo has put another one around
            if before is not None:
                before.restore()
            return original(self.attention.module, *args, **kwargs), reason

    def _first_call(self, shapes: str, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes the first call of a class of shapes, and decides where later ones go."""
        is_trial_step = self._judge.is_trial_step
        may_try = not self.tried if is_trial_step else self.is_open
        if shapes in self.tried or not may_try:  # tried: this is perhaps the recomputation of that call
            return original(self.attention.module, *args, **kwargs)
        choice = None if is_trial_step else self._known_choice(shapes)
        if choice is not None:
            self.choices[shapes] = choice
            return self._route(original, args, kwargs)
        verdict, outputs = self._rehearsed(shapes, original, args, kwargs)
        self._record(shapes, verdict)
        return outputs

    def _rehearsed(
        self, shapes: str, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Verdict, Any]:
        """Computes a call and tries backends on it. Sites that are alike share times and spreads."""
        site, judge = self.attention, self._judge
        by_clock = judge.goes_by_clock(site)
        alike = (type(site.module), shapes, *(tuple(parameter.shape) for parameter in site.module.parameters()))
        timed = judge.timed.get(alike) if by_clock else None
        backends = list(judge.backends.values())
        if timed is not None:
            backends = [judge.backends.get(timed.choices[shapes], backends[0])]
        rehearsal = Rehearsal(
            backends, by_clock=by_clock and timed is None, purse=judge.run.purse, spreads=judge.spreads[alike]
        )
        before = StateSnapshot(site.module, Level.FULL, device_of(site.module))
        outputs, failure = self._attempt(rehearsal, original, args, kwargs, before)
        if failure:
            failed = Verdict("failed", f"failed in its trial: {failure}")
            return Verdict("refused", reason) if (reason := site.given_up()) else failed, outputs
        found = rehearsal.verdict(shapes, site.nothing_found())
        if timed is not None:
            return (timed if found.keep else found), outputs
        if by_clock and found.choices:
            judge.timed[alike] = found
        return found, outputs

    def _known_choice(self, shapes: str) -> str | None:
        """What holds for a class without a trial."""
        if not self._judge.run.verify:
            return next(iter(self._judge.backends))
        known = nearest_choice(shapes, self.choices)
        is_full = len(self.choices) >= _MAX_CLASSES
        return known if is_full or (known == ORIGINAL and not self._judge.goes_by_clock(self.attention)) else None

    def _record(self, shapes: str, verdict: Verdict) -> None:
        choice = self.tried[shapes] = verdict.choices.get(shapes, ORIGINAL)
        known = nearest_choice(shapes, self.choices)
        if self._judge.is_trial_step:
            self._judge.revise(self.site, verdict)
        elif not verdict.choices and verdict.kind != "too_dear":
            self.refuse(verdict)
        elif known is None or (verdict.keep and known == ORIGINAL):
            reason = f"{self.change}: {verdict.reason}" if verdict.keep else verdict.reason
            self._judge.revise(self.site, replace(verdict, reason=reason, choices={**self.choices, shapes: choice}))

    def _watch_gradients(self, outputs: Any) -> Any:
        """Notes, before anything is fused, whether gradients through the site are differentiated again."""

        def note(gradient: Tensor) -> None:
            self.is_differentiated_twice |= torch.is_grad_enabled()

        for tensor in tensors_in(outputs) if torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                tensor.register_hook(note)  # type: ignore[no-untyped-call]
        return outputs


# -- classes of shapes: plain text, which travels in checkpoints and from rank 0 to the others -------------------------


def shape_class(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The kind of call: mode, gradients, dtypes, and every size to the next power of two."""
    facts: list[Any] = [module.training, torch.is_grad_enabled()]
    device = ""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            device = device or value.device.type
            # A nested tensor has no shape to ask for.
            facts += (value.dtype, () if value.is_nested else value.shape)
    facts.append(torch.get_autocast_dtype(device) if device and torch.is_autocast_enabled(device) else None)
    return _shape_class(tuple(facts))


@functools.lru_cache(maxsize=4096)
def _shape_class(facts: tuple[Any, ...]) -> str:
    training, gradients, *tensors, cast = facts
    sizes = (
        f"{dtype}{[(size - 1).bit_length() for size in shape]}"
        for dtype, shape in zip(tensors[::2], tensors[1::2], strict=True)
    )
    head = f"{'train' if training else 'eval'}, {'grad' if gradients else 'no grad'}, {cast or '-'}"
    return f"{head}: {' '.join(sizes)}".replace("torch.", "")


def nearest_choice(shapes: str, choices: Mapping[str, str]) -> str | None:
    """The choice of the class whose sizes are nearest, among those of the same mode and dtypes if there are any."""
    head, exponents = _read(shapes)

    def distance(other: str) -> tuple[bool, int]:
        other_head, others = _read(other)
        far = sum(abs(a - b) for a, b in zip(exponents, others, strict=False)) + 100 * abs(len(exponents) - len(others))
        return head != other_head, far

    return choices[min(choices, key=distance)] if choices else None


def _read(shapes: str) -> tuple[str, list[int]]:
    head, _, sizes = shapes.partition(": ")
    return head, [int(number) for number in re.findall(r"\b\d+\b", sizes)]  # not those in the names of dtypes
