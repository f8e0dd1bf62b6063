"""The layers of a step in a stated order: each Lightning method is patched once, and calls its layers in `ORDER`.

A training step runs from the outside in::

    timeline → logger → xla → oom_report → retry → outputs → split → Lightning's own training_step
        → precision → techniques → the user's training_step

The last three are not layers: Lightning enters the contexts of the precision plugin within its own ``training_step``,
and the plugin enters autocast first and then the techniques. ``backward`` and ``optimizer_step`` pass the same layers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

from typing_extensions import override

from lightning_accel.core.patch import MethodPatch, Patch, PatchSet

ORDER = (
    "timeline",  # tells timers and tracers when each phase of a step begins and ends
    "logger",  # calls the hooks of a SpeedMemoryLogger that is not among the user's callbacks
    "xla",  # ends steps that XLA records, and counts its compilations
    "oom_report",  # raises a page in place of an out-of-memory error
    "retry",  # undoes a failed step, and runs it again with fewer edits or less memory
    "outputs",  # gives tensors that outlive a step the dtype and the layout of a plain run
    "split",  # sends a batch through the step in parts
    "preprocess",  # prepares batches in a pipeline around the loader, or during their transfer
    "techniques",  # passes loaders and batches to the techniques
)

Call = Callable[..., Any]
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""The methods of a strategy that run one step."""


class Layer(Patch):
    """One action around methods of Lightning's objects, with a place in :data:`ORDER`.

    A class has a method ``around_<method>(call, *args, **kwargs)`` for each Lightning method that it treats specially,
    without the leading underscore that some of Lightning's names have. All others pass :meth:`around`.

    Args:
        targets: Pairs of an object and the names of its methods.
        companions: Other patches, applied while the layer is enabled.
    """

    name: ClassVar[str]  # its place in ORDER

    def __init__(self, targets: Iterable[tuple[Any, Collection[str]]], companions: Iterable[Patch] = ()) -> None:
        self._targets = [(owner, method) for owner, methods in targets for method in methods]
        methods = ", ".join(f"{type(owner).__name__}.{method}" for owner, method in self._targets)
        super().__init__(f"{self.name} around {methods}", "a layer of the step")
        self.companions = PatchSet(companions)
        self.is_enabled = True  # whether the layer is called
        self.chains: list[_Chain] = []

    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Calls the method ``stage``, acts before it, after it or in its place, and returns its result.

        ``call`` is the method without this layer: the inner layers, then Lightning's own method.
        """
        raise NotImplementedError(f"{type(self).__name__} has nothing to do around {stage}")

    @override
    def _apply(self) -> None:
        for owner, method in self._targets:
            chain = _chain_of(owner, method) or _Chain(owner, method)
            chain.add(self)
            self.chains.append(chain)
        self.companions.apply()

    @override
    def _undo(self) -> None:
        self.companions.undo()
        while self.chains:
            self.chains.pop().remove(self)


class _Chain:
    """One method of one object, and the layers around it."""

    def __init__(self, owner: Any, method: str) -> None:
        if not callable(getattr(owner, method)):
            raise TypeError(f"{type(owner).__name__}.{method} is no method.")
        self.owner, self.method = owner, method
        self.layers: list[Layer] = []
        self._patch = MethodPatch(method, "calls its layers", owner, method, self._wrapped)

    def add(self, layer: Layer) -> None:
        # Of two layers with one name, the later one is further outside.
        self.layers = sorted([layer, *self.layers], key=lambda one: ORDER.index(one.name))
        self._patch.apply()
        self.compose()

    def remove(self, layer: Layer) -> None:
        self.layers = [one for one in self.layers if one is not layer]
        self.compose()
        if not self.layers:
            self._patch.undo()

    def _wrapped(self, original: Call) -> Call:
        self._original: Call = types.MethodType(original, self.owner)

        def method(caller: Any, *args: Any, **kwargs: Any) -> Any:
            # A copy of the owner has this attribute, too, but its steps do not pass the layers.
            return self.call(*args, **kwargs) if caller is self.owner else original(caller, *args, **kwargs)

        method.chain = self  # type: ignore[attr-defined]
        return method

    def compose(self) -> None:
        """Builds the call again after layers were added, removed or set aside."""
        self.call: Call = self._original
        for layer in reversed(self.layers):
            if layer.is_enabled:
                own = getattr(layer, f"around_{self.method.lstrip('_')}", None)
                around = own or functools.partial(layer.around, self.method)
                self.call = functools.partial(around, self.call)


def _chain_of(owner: Any, method: str) -> _Chain | None:
    """Returns the chain of a method, also if other code has wrapped the method since; None if there is none."""
    function = getattr(vars(owner).get(method), "__func__", None)
    while function is not None:
        chain = vars(function).get("chain")
        if isinstance(chain, _Chain) and chain.owner is owner and chain.layers:
            return chain
        function = getattr(function, "__wrapped__", None)
    return None


class StepPipeline:
    """The layers of one run around its steps, in :data:`ORDER`. They are enabled and disabled together."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        self._layers: list[Layer] = []
        self.add(*layers)

    def add(self, *layers: Layer) -> None:
        """Applies layers to their methods. If one fails, those before it stay."""
        for layer in layers:
            layer.apply()
            self._layers.append(layer)

    def enable(self, is_enabled: bool) -> None:
        """Enables all layers, or disables them until they are enabled again."""
        # Live trials call this between two steps, so each method is composed only once, for all its layers.
        chains = {id(chain): chain for layer in self._layers for chain in layer.chains}
        for layer in self._layers:
            layer.is_enabled = is_enabled
            (layer.companions.apply if is_enabled else layer.companions.undo)()
        for chain in chains.values():
            chain.compose()

    def clear(self) -> None:
        """Removes all layers."""
        while self._layers:
            layer = self._layers.pop()
            layer.undo()
            layer.is_enabled = True

    def __repr__(self) -> str:
        layers = sorted(self._layers, key=lambda layer: ORDER.index(layer.name))
        names = [layer.name if layer.is_enabled else f"({layer.name}, disabled)" for layer in layers]
        return " → ".join([*dict.fromkeys(names), "Lightning"])
