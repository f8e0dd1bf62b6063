"""What every kind of attention site offers to the trial, whichever way its attention was found."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from lightning_accel.techniques.flash_attention.backend_trial import Rehearsal
from lightning_accel.techniques.flash_attention.backends import Backend

Forward = Callable[..., Any]


class AttentionSite(ABC):
    """A module whose attention another backend may compute."""

    what: str  # was found there, for the report: "nn.MultiheadAttention"

    def __init__(self, site: str, module: nn.Module) -> None:
        self.site = site  # its qualified name in the model
        self.module = module

    @abstractmethod
    def run(self, by: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward pass of these arguments, with its attention through a backend.

        Given a rehearsal, as the original computes it, and each of its attentions is rehearsed. ``original`` is the
        module's own ``forward``, as a function of ``(module, *args, **kwargs)``. No code of the user's runs more often
        than it would without.
        """

    def nothing_found(self) -> str | None:
        """After a run: why there was nothing to fuse in it; None if there was."""
        return None

    def given_up(self) -> str | None:
        """Why it should be run no more; None if it should."""
        return None

    def close(self) -> None:  # noqa: B027  # most have captured nothing
        """Forgets what was captured."""

    def is_named(self, names: Iterable[str]) -> bool:
        """Whether one of ``names`` is its class, its path or the path of a module around it."""
        return any(
            name in (type(self.module).__name__, self.site) or self.site.startswith(f"{name}.") for name in names
        )

    def rehearse_whole(
        self, rehearsal: Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], **how: Any
    ) -> None:
        """Tries backends on all that the module computes: for a module whose code nobody watches."""

        def by(backend: Backend) -> Forward:
            return lambda *args, **kwargs: self.run(backend, original, args, kwargs)

        rehearsal.rehearse(functools.partial(original, self.module), by, args, kwargs, module=self.module, **how)
