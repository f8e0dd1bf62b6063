"""Where a technique can act, and how: a site has variants, each of which is applied and undone by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from typing_extensions import override

from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.techniques.arms import OFF


@dataclass(frozen=True)
class Variant:
    """One way to act at a site."""

    name: str
    apply: Callable[[], Any]
    undo: Callable[[], Any]


class Site(Patch):
    """A place where a technique can act. The user's own way, ``"off"``, is none of its variants.

    Args:
        name: The qualified name of a module in the model, ``""`` for the model itself.
        variants: The ways to act there; the first is in force once the site is applied. None: nothing is done there.
        change: What is done, for the report.
        why_not: Why nothing is done.
    """

    def __init__(self, name: str, variants: Sequence[Variant] = (), change: str = "", why_not: str = "") -> None:
        super().__init__(name, change)
        self.why_not = why_not
        self._variants = {variant.name: variant for variant in variants}
        self.variants = tuple(self._variants)
        self._chosen = next(iter(self.variants), OFF)

    @override
    def switch(self, variant: str) -> None:
        if variant != self._chosen:
            self.undo()
        if variant in self._variants:
            self._chosen = variant
            self.apply()

    @override
    def _apply(self) -> None:
        self._variants[self._chosen].apply()

    @override
    def _undo(self) -> None:
        self._variants[self._chosen].undo()


class Pausable(Protocol):
    """Stands in for a module's forward, and does as the original while it is paused."""

    is_paused: bool

    @property
    def is_used(self) -> bool:
        """Whether it has done anything so far, which live trials could judge."""

    def rebound(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The module's forward from now on."""


class PausedPatch(MethodPatch):
    """Rebinds a module's forward. Live trials pause it, as other patches may stand on top of it by then."""

    def __init__(self, site: str, change: str, module: nn.Module, owner: Pausable) -> None:
        super().__init__(site, change, module, "forward", owner.rebound)
        self._owner = owner

    @property
    @override
    def variants(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("on",) if self._owner.is_used else ()

    @override
    def switch(self, variant: str) -> None:
        self._owner.is_paused = variant == OFF
