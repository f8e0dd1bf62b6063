"""One step in an order that can be read: each method of Lightning's is patched once, and calls its layers in `ORDER`.

A step of training runs from the outside in::

    timeline → logger → xla → oom_report → retry → outputs → split → Lightning's own training_step
        → precision → techniques → the user's training_step

The last three are no layers: Lightning calls the contexts of the precision plugin within its own ``training_step``, and
the plugin enters autocast first and then the techniques. ``backward`` and ``optimizer_step`` pass the same layers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

from typing_extensions import override

from lightning_accel.core.patch import MethodPatch, Patch, PatchSet

ORDER = (
    "timeline",  # tells those who time or trace a step which phase begins and ends
    "logger",  # calls the hooks of a SpeedMemoryLogger that is none of the user's callbacks
    "xla",  # ends steps that XLA records, and counts what it compiles
    "oom_report",  # raises a page in place of the bare error where memory has run out
    "retry",  # takes a failed step back, and runs it again with less of ours or with less memory
    "outputs",  # hands on what outlives a step in the dtype and the layout that it has in a plain run
    "split",  # sends a batch through the step in parts
    "preprocess",  # prepares batches: in a pipeline around the loader, or at their transfer
    "techniques",  # gives loaders and batches to the techniques
)

Call = Callable[..., Any]
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""The methods of a strategy that run one step."""


class Layer(Patch):
    """One thing that is done around methods of Lightning's objects. It has its place in :data:`ORDER`.

    A class has a method ``around_<method>(call, *args, **kwargs)`` for each of Lightning's that needs its own, without
    the underscore that begins some of Lightning's names. All others pass :meth:`around`.

    Attributes:
        name: The place in :data:`ORDER`.
        stands: Whether it is called; if not, it stands aside.

    Args:
        targets: Pairs of an object and the names of its methods.
        companions: Other patches that are in force while the layer stands.
    """

    name: ClassVar[str]

    def __init__(self, targets: Iterable[tuple[Any, Collection[str]]], companions: Iterable[Patch] = ()) -> None:
        self._targets = [(owner, method) for owner, methods in targets for method in methods]
        methods = ", ".join(f"{type(owner).__name__}.{method}" for owner, method in self._targets)
        super().__init__(f"{self.name} around {methods}", "a layer of the step")
        self.companions = PatchSet(companions)
        self.stands = True
        self.chains: list[_Chain] = []

    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Calls a method, and does what the layer is for before, after or instead.

        Args:
            stage: The method's name.
            call: The method without this layer: the layers inside of it, then Lightning's own.
            args: The arguments of the method.
            kwargs: The same by name.

        Returns:
            What the method returns.
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
        self._original: Call = getattr(owner, method)
        self.call = self._original

    def add(self, layer: Layer) -> None:
        # Of one name, the layer that comes later stands further outside.
        self.layers = sorted([layer, *self.layers], key=lambda one: ORDER.index(one.name))
        self._patch.apply()
        self.compose()

    def remove(self, layer: Layer) -> None:
        self.layers = [one for one in self.layers if one is not layer]
        self.compose()
        if not self.layers:
            self._patch.undo()

    def _wrapped(self, original: Call) -> Call:
        self._original = types.MethodType(original, self.owner)

        def method(caller: Any, *args: Any, **kwargs: Any) -> Any:
            # A copy of the owner has the attribute, too. The layers are not for its steps.
            return self.call(*args, **kwargs) if caller is self.owner else original(caller, *args, **kwargs)

        method.chain = self  # type: ignore[attr-defined]
        return method

    def compose(self) -> None:
        """Makes the call anew, after layers came, went or stood aside."""
        self.call = self._original
        for layer in reversed(self.layers):
            if layer.stands:
                own = getattr(layer, f"around_{self.method.lstrip('_')}", None)
                around = own or functools.partial(layer.around, self.method)
                self.call = functools.partial(around, self.call)


def _chain_of(owner: Any, method: str) -> _Chain | None:
    """The chain of a method, below whatever others have wrapped around it; None if there is none."""
    function = getattr(vars(owner).get(method), "__func__", None)
    while function is not None:
        chain = vars(function).get("chain")
        if isinstance(chain, _Chain) and chain.owner is owner and chain.layers:
            return chain
        function = getattr(function, "__wrapped__", None)
    return None


class StepPipeline:
    """The layers that one run has around its steps, in :data:`ORDER`. They stand, or stand aside, together."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        self._layers: list[Layer] = []
        self.add(*layers)

    def add(self, *layers: Layer) -> None:
        """Puts layers around their methods. If one cannot be put there, those before it stay."""
        for layer in layers:
            layer.apply()
            self._layers.append(layer)

    def stand_aside(self) -> None:
        """Leaves the steps to Lightning until :meth:`stand`."""
        self._let_stand(False)

    def stand(self) -> None:
        """Puts all layers around the steps again."""
        self._let_stand(True)

    def _let_stand(self, stands: bool) -> None:
        # Live trials do this between two steps: each method is composed once, whatever the number of its layers.
        chains = {id(chain): chain for layer in self._layers for chain in layer.chains}
        for layer in self._layers:
            layer.stands = stands
            if stands:
                layer.companions.apply()
            else:
                layer.companions.undo()
        for chain in chains.values():
            chain.compose()

    def clear(self) -> None:
        """Leaves the methods to Lightning for good."""
        while self._layers:
            layer = self._layers.pop()
            layer.undo()
            layer.stands = True

    def __repr__(self) -> str:
        layers = sorted(self._layers, key=lambda layer: ORDER.index(layer.name))
        names = [layer.name if layer.stands else f"({layer.name}, stands aside)" for layer in layers]
        return " → ".join([*dict.fromkeys(names), "Lightning"])
