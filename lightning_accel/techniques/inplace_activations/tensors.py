"""What happens to tensors while a function is read: they are read, kept, overwritten, passed through modules."""

from __future__ import annotations

import types
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from lightning_accel.techniques.inplace_activations import catalog
from lightning_accel.techniques.inplace_activations.sites import hook_on
from lightning_accel.techniques.inplace_activations.values import (
    NOTHING,
    Facts,
    Foreign,
    Fresh,
    Many,
    Method,
    Mod,
    State,
    Value,
    foreign,
)

if TYPE_CHECKING:
    from lightning_accel.techniques.inplace_activations.ownership import Reader

_PRODUCER_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class Tensors:
    """The state of one function under analysis, and the events that change it.

    Attributes:
        state: None where the code cannot be reached.
        observers: States that gather every intermediate state, for exception handlers.
        returns: What the function may return: a reason why it is not the caller's to overwrite, or None, and the
            modules whose hooks see it.
    """

    def __init__(self, reader: Reader, module: nn.Module, qualname: str, code: types.CodeType) -> None:
        self.reader = reader
        self.module = module
        self.qualname = qualname
        self.code = code
        self.state: State | None = State()
        self.observers: list[State] = []
        self.returns: list[tuple[str | None, frozenset[Mod]]] = []
        self.depth = 0

    @property
    def now(self) -> State:
        assert self.state is not None
        return self.state

    def changed(self) -> None:
        for observer in self.observers:
            observer.absorb(self.now)

    # Events

    def use(self, value: Value, how: str | None, *, harmless: bool = False, keeps_modules: bool = False) -> None:
        """``value`` is read, and perhaps kept.

        Args:
            value: What is read.
            how: Says so, in words that follow "its input …"; None: nothing of it is kept.
            harmless: Whoever reads it neither keeps it nor hands it on.
            keeps_modules: Modules in it are still followed, so that they are not lost to the analysis.
        """
        for item in value:
            if isinstance(item, Fresh):
                for tensor, via in list(self.now.identities(item)):
                    facts = self.now.facts[tensor]
                    for site in facts.consumers - via:
                        again = (how or "is overwritten").removesuffix(", before the activation")
                        self.reader.refuse_name(site, f"its input is needed again: it {again}")
                    if not harmless:
                        self.reader.escaped |= facts.result_of
                    if how is not None and facts.spoiled is None:
                        self.now.update(tensor, spoiled=how)
                self.changed()
            elif isinstance(item, Method):
                self.reader.call_method(item.module.target, item.name)
            elif not keeps_modules and isinstance(item, Mod | Many):
                for module in (item,) if isinstance(item, Mod) else item.modules:
                    self.reader.expose(module.target, f"{self.reader.label(module.target)} {how or 'is handed on'}")

    def mutate(self, value: Value, where: str) -> None:
        """``value`` is overwritten by the model's own code."""
        for item in value:
            if isinstance(item, Fresh):
                for tensor, _ in list(self.now.identities(item)):
                    for site in self.now.facts[tensor].result_of:
                        self.reader.refuse_result(site, where)
            elif isinstance(item, Foreign) and item.is_tensor:
                self.reader.overwrites_unknown = self.reader.overwrites_unknown or where

    def returned(self, value: Value, where: str) -> None:
        """The function returns ``value``."""
        if self.depth:
            self.use(value, f"is returned by a nested function ({where})")
            return
        for item in value:
            if isinstance(item, Fresh):
                families = [self.now.facts[tensor] for tensor, _ in self.now.identities(item)]
                spoiled = next((facts.spoiled for facts in families if facts.spoiled), None)
                origins = frozenset(origin for facts in families for origin in facts.origins)
                self.returns.append((spoiled, origins))
            elif isinstance(item, Foreign):
                self.returns.append((item.reason, frozenset()))
        self.use(value, f"is returned at {where}")

    # Modules

    def call_module(
        self, module: nn.Module, arguments: Sequence[Value], keywords: bool, key: Hashable, where: str
    ) -> Value:
        """Calls ``module``; ``key`` names the expression that does."""
        label = self.reader.label(module)
        key = (key, label)
        first = arguments[0] if arguments else NOTHING
        if module in self.reader.site_names:
            return self._consume(module, arguments, keywords, key, where)
        if self.reader.is_opaque(module):
            self._use_all(arguments, f"is read by {label} at {where}")
            return foreign(f"comes from {label}, which does not run its class's plain forward")
        if getattr(module, "inplace", False) is True and catalog.is_builtin(module):
            self.mutate(first, where)
        if catalog.is_plainly(module, catalog.PASSING_MODULES):
            return self._pass(module, first, key, frozenset())
        if catalog.is_plainly(module, catalog.FRESH_MODULES):
            self._use_all(arguments, f"is read by {label} at {where}, before the activation", harmless=True)
            return self._result(module, key)
        if catalog.is_plainly(module, catalog.VIEW_MODULES):
            self._use_all(arguments, f"is viewed by {label} at {where}")
            return foreign(f"is a view, made by {label}")
        harmless = catalog.is_builtin(module) and not list(module.children())
        self._use_all(arguments, f"is read by {label} at {where}, before the activation", harmless=harmless)
        if harmless and type(module).__module__ == "torch.nn.modules.activation":
            return foreign(f"is saved for the backward pass by {label}")
        if catalog.is_builtin(module) and not catalog.is_sequential(module):
            return foreign(f"comes from {label} ({type(module).__name__}), which is not known to give a fresh tensor")
        reason, origins = self.reader.result_of_forward(module)
        if reason is not None:
            return foreign(reason)
        return self._result(module, key, origins)

    def _use_all(self, arguments: Sequence[Value], how: str, *, harmless: bool = False) -> None:
        for argument in arguments:
            self.use(argument, how, harmless=harmless)

    def _result(self, module: nn.Module, key: Hashable, origins: frozenset[Mod] = frozenset()) -> Value:
        hook = hook_on(module, _PRODUCER_HOOKS)
        if hook is not None:
            return foreign(f"may be kept by {hook} on {self.reader.label(module)}")
        return frozenset({self.now.create(key, Facts(origins=origins | {Mod(module)}))})

    def _pass(self, module: nn.Module, value: Value, key: Hashable, via: frozenset[str]) -> Value:
        """``module`` gives its very input, or something computed from it that nobody else has."""
        tensors = frozenset(item for item in value if isinstance(item, Fresh))
        rest = value - tensors
        if not tensors:
            return rest
        hook = hook_on(module, (*_PRODUCER_HOOKS, "_forward_pre_hooks"))
        facts = Facts(
            spoiled=f"may be kept by {hook} on {self.reader.label(module)}" if hook and not via else None,
            parents=frozenset((tensor, via) for tensor in tensors),
            origins=frozenset({Mod(module)}),
        )
        # A tensor of an earlier turn of a loop may be its own parent's namesake: creating first keeps them apart.
        return rest | {self._create_after(key, facts)}

    def _create_after(self, key: Hashable, facts: Facts) -> Fresh:
        made = self.now.create(key, Facts())
        renamed = frozenset(
            (tensor if tensor != made else Fresh(made.key, is_old=True), via) for tensor, via in facts.parents
        )
        self.now.update(made, **vars(replace(facts, parents=renamed)))
        return made

    def _consume(self, site: nn.Module, arguments: Sequence[Value], keywords: bool, key: Hashable, where: str) -> Value:
        """A site is called: would it do harm if it overwrote what it is given?"""
        name = self.reader.site_names[site]
        if len(arguments) != 1 or keywords:
            self.reader.refuse_name(name, f"it is called with more than one plain argument at {where}")
            for argument in arguments:
                self.use(argument, f"is read by {name} at {where}")
            return foreign(f"comes from {name}")
        (value,) = arguments
        reasons = [item.reason for item in value if isinstance(item, Foreign)]
        tensors = [item for item in value if isinstance(item, Fresh)]
        origins: set[Mod] = set()
        for tensor in tensors:
            for same, via in self.now.identities(tensor):
                facts = self.now.facts[same]
                origins |= facts.origins
                reasons += [facts.spoiled] if facts.spoiled else []
                for other in facts.consumers - via:
                    self.reader.refuse_name(other, f"its input is read again by {name} at {where}")
                    reasons.append(f"went through {other} before")
        if not reasons and len(tensors) != len(value):
            reasons.append("is not a tensor that can be followed")
        if not value:
            reasons.append("is not a tensor that can be followed")
        if reasons:
            reason = sorted(reasons)[0]
            self.reader.refuse_name(name, f"its input {reason}" if where in reason else f"its input {reason} ({where})")
        else:
            self.reader.prove_call(name, self.code, self.module, origins)
        for tensor in tensors:
            for same, _ in list(self.now.identities(tensor)):
                self.now.update(same, consumers=self.now.facts[same].consumers | {name})
        self.changed()
        self.use(frozenset(item for item in value if isinstance(item, Mod | Many | Method)), f"is given to {name}")
        if catalog.is_plainly(site, catalog.PASSING_MODULES):
            return self._pass(site, value, key, frozenset({name}))
        facts = Facts(spoiled=f"is saved for the backward pass by {name}", result_of=frozenset({name}))
        return frozenset({self.now.create(key, facts)})
