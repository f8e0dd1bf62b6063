"""Stands at a site and sends every call where it was decided to go: to the original, or to a backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.core.isolation import is_trial
from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.core.tree import tensors_in
from lightning_accel.techniques.flash_attention.rehearsal import ORIGINAL
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward

MAX_CLASSES = 16  # of one site that are decided by trial; beyond, the nearest of them decides

# A key is plain text: it travels in checkpoints, and from rank 0 to the others.
Meet = Callable[["Dispatch", str, Forward, tuple[Any, ...], dict[str, Any]], Any]


class Dispatch:
    """One site at work.

    Attributes:
        choices: Shape class → the name of a backend, or ``"original"``.
        is_open: Whether calls may go elsewhere than to the original yet.
        is_refused: Whether none ever may.
        is_differentiated_twice: Whether a gradient penalty was seen: kernels have no second derivative.

    Args:
        attention: The site.
        meet: Computes the first call of a shape class that has no choice yet, and may make one.
        run: Runs the site's forward pass through the named backend.
    """

    def __init__(self, attention: AttentionSite, meet: Meet, run: Callable[..., Any]) -> None:
        self.attention = attention
        self.choices: dict[str, str] = {}
        self.is_open = False
        self.is_refused = False
        self.is_differentiated_twice = False
        self._meet = meet
        self._run = run
        self._method = MethodPatch(attention.site, "", attention.module, "forward", self._wrap)

    @property
    def change(self) -> str:
        """For the report."""
        return f"{self.attention.what} → fused"

    @property
    def is_fusing(self) -> bool:
        """Whether some class of calls goes to a backend."""
        return self.is_open and not self.is_refused and any(choice != ORIGINAL for choice in self.choices.values())

    def install(self) -> None:
        self._method.apply()

    def remove(self) -> None:
        """Takes the site's forward back; what was bound over it must be gone by then."""
        self._method.undo()
        self.attention.close()

    def choose(self, choices: Mapping[str, str]) -> None:
        self.choices.update(choices)
        self.is_open = True

    def _wrap(self, original: Forward) -> Forward:
        dispatch = self

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not dispatch._is_concerned(self):
                return original(self, *args, **kwargs)
            return dispatch._send(original, args, kwargs)

        forward.is_fused = True  # type: ignore[attr-defined]
        return forward

    def _is_concerned(self, module: nn.Module) -> bool:
        # A deep copy of the module (EMA, the oracle of a trial) is not the site. A compiler is to see the original.
        return (
            module is self.attention.module
            and not self.is_refused
            and not torch.compiler.is_compiling()
            and not torch._C._get_tracing_state()
        )

    def _send(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = shape_class(self.attention.module, args, kwargs)
        choice = self.choices.get(key)
        if choice is None and not is_trial():
            outputs = self._meet(self, key, original, args, kwargs)
            return outputs if self.is_open else self._watched(outputs)
        if choice is None or choice == ORIGINAL or not self.is_open:
            return original(self.attention.module, *args, **kwargs)
        return self._run(self, choice, original, args, kwargs)

    def _watched(self, outputs: Any) -> Any:
        """Notes, before anything is fused, whether gradients through the site are differentiated again."""

        def note(gradient: Tensor) -> None:
            self.is_differentiated_twice |= torch.is_grad_enabled()

        for tensor in tensors_in(outputs) if torch.is_grad_enabled() and not is_trial() else ():
            if tensor.requires_grad:
                tensor.register_hook(note)  # type: ignore[no-untyped-call]
        return outputs


class DispatchPatch(Patch):
    """Lets a site's calls go to backends. Undone, all go to the original: other techniques may stand on top of it."""

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__(dispatch.attention.site, dispatch.change)
        self.dispatch = dispatch

    @override
    def _apply(self) -> None:
        self.dispatch.install()
        self.dispatch.is_refused = False

    @override
    def _undo(self) -> None:
        self.dispatch.is_refused = True


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


def nearest_choice(key: str, choices: Mapping[str, str]) -> str | None:
    """The choice of the class whose sizes are nearest, among those of the same mode and dtypes if there are any."""
    if not choices:
        return None
    head, _, sizes = key.partition(": ")

    def distance(other: str) -> tuple[bool, int]:
        other_head, _, other_sizes = other.partition(": ")
        exponents, others = _numbers(sizes), _numbers(other_sizes)
        far = sum(abs(a - b) for a, b in zip(exponents, others, strict=False)) + 100 * abs(len(exponents) - len(others))
        return head != other_head, far

    return choices[min(choices, key=distance)]


def _numbers(sizes: str) -> list[int]:
    lists = [part.partition("]")[0] for part in sizes.split("[")[1:]]
    return [int(number) for numbers in lists for number in numbers.split(",") if number.strip()]
