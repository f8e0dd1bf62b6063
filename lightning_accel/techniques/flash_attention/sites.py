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
    def fused(self, backend: Backend, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward pass of these arguments, with its attention through ``backend``.

        ``original`` is the module's own ``forward``, as a function of ``(module, *args, **kwargs)``.
        """

    @abstractmethod
    def rehearsed(self, rehearsal: Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward pass as the original computes it, with a rehearsal at each of its attentions.

        No code of the user's runs more often than it would without.
        """

    def nothing_found(self) -> str | None:
        """After a call of one of the two: why there was nothing to fuse in what ran; None if there was."""
        return None

    def given_up(self) -> str | None:
        """Why :meth:`fused` should be called no more; None if it should."""
        return None

    def close(self) -> None:  # noqa: B027  # most have captured nothing
        """Forgets what was captured."""

    def is_named(self, names: Iterable[str]) -> bool:
        """Whether one of ``names`` is its class, its path or the path of a module around it."""
        return any(
            name in (type(self.module).__name__, self.site) or self.site.startswith(f"{name}.") for name in names
        )


def rehearse_whole(
    site: AttentionSite,
    rehearsal: Rehearsal,
    original: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    judged: Callable[[Any], Any] = lambda outputs: outputs,
) -> None:
    """Tries backends on all that the site's module computes: for a module whose code nobody watches."""

    def by(backend: Backend) -> Forward:
        return lambda *args, **kwargs: site.fused(backend, original, args, kwargs)

    plain = functools.partial(original, site.module)
    rehearsal.rehearse(plain, by, args, kwargs, module=site.module, judged=judged)
