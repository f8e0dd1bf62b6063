"""Proof 1: in the code, on every path it can take, nobody but the activation reads its input from then on."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_accel.techniques.inplace_activations import catalog
from lightning_accel.techniques.inplace_activations.holders import held_by_plain_attributes
from lightning_accel.techniques.inplace_activations.interpreter import Interpreter
from lightning_accel.techniques.inplace_activations.sites import find_sites, is_rewired
from lightning_accel.techniques.inplace_activations.source import Function, UnreadableError, nested_codes, read
from lightning_accel.techniques.inplace_activations.tensors import Tensors
from lightning_accel.techniques.inplace_activations.values import Mod, foreign

# In place, their backward reads the result and no longer the input: the result may then not be overwritten either.
SAVING_RESULT_IN_PLACE = (nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.RReLU)


@dataclass
class Proof:
    """What is known of one site.

    Attributes:
        reason: Why its input may not be overwritten; None when it may.
        callers: The code that was proven to call it harmlessly, each with the ``id`` of the module it runs in.
        producers: The modules that made its input: no hook may sit on them.
    """

    reason: str | None = None
    callers: set[tuple[types.CodeType, int]] = field(default_factory=set)
    producers: set[nn.Module] = field(default_factory=set)


def prove_inputs_owned(model: nn.Module) -> dict[str, str | None]:
    """Reads the code of ``model``: which activations are the last to read their input?

    Returns:
        For every activation and dropout that has an in-place form: None when it could overwrite its input as far as
        the code shows, else the reason why not.
    """
    return {site: proof.reason for site, proof in prove(model).items()}


def prove(model: nn.Module, skip: Mapping[nn.Module, str] | None = None) -> dict[str, Proof]:
    """The proofs behind :func:`prove_inputs_owned`; sites in ``skip`` are refused from the start."""
    sites = find_sites(model)
    if not sites:
        return {}
    reader = Reader(model, sites)
    for site, reason in (skip or {}).items():
        reader.refuse(site, reason)
    reader.read_everything()
    return reader.proofs


class Reader:
    """Reads all the code of a model that may run during a step.

    Attributes:
        escaped: Sites whose result is handed to code that may overwrite it.
        overwrites_unknown: Where the model's code overwrites a tensor whose maker is not known; None if nowhere.
    """

    def __init__(self, model: nn.Module, sites: dict[str, nn.Module]) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.site_names = {module: name for name, module in sites.items()}
        self.proofs = {name: Proof() for name in sites}
        self.escaped: set[str] = set()
        self.overwrites_unknown: str | None = None
        self._results: dict[tuple[Any, nn.Module], tuple[str | None, frozenset[Mod]]] = {}
        self._sources: dict[Any, Function | UnreadableError] = {}

    # What the interpreters tell

    def knows(self, module: nn.Module) -> bool:
        return module in self.names

    def label(self, module: nn.Module) -> str:
        return self.names.get(module) or type(module).__name__

    def refuse(self, site: nn.Module, reason: str) -> None:
        self.refuse_name(self.site_names[site], reason)

    def refuse_name(self, site: str, reason: str) -> None:
        if self.proofs[site].reason is None:
            self.proofs[site].reason = reason

    def refuse_result(self, site: str, where: str) -> None:
        """The result of ``site`` is overwritten."""
        if isinstance(self.model.get_submodule(site), SAVING_RESULT_IN_PLACE):
            self.refuse_name(site, f"its result, which it would need for the backward pass, is overwritten at {where}")

    def prove_call(self, site: str, code: types.CodeType, module: nn.Module, producers: Iterable[Mod]) -> None:
        self.proofs[site].callers |= {(nested, id(module)) for nested in nested_codes(code)}
        self.proofs[site].producers |= {producer.target for producer in producers}

    def expose(self, module: nn.Module, reason: str) -> None:
        """Code that cannot be followed gets hold of ``module`` and all below it."""
        for member in module.modules():
            if member in self.site_names:
                self.refuse(member, reason)

    def is_opaque(self, module: nn.Module) -> bool:
        return is_rewired(module)

    # Reading

    def read_everything(self) -> None:
        for module, holder in held_by_plain_attributes(self.model):
            self.expose(module, f"{self.label(module)} is also held by the plain attribute {holder}")
        thorough = any(isinstance(site, SAVING_RESULT_IN_PLACE) for site in self.site_names)
        for module in self.names:
            # Code without sites below it can do harm only by overwriting what it is given.
            may_overwrite = thorough and not catalog.is_builtin(module)
            if may_overwrite or any(member in self.site_names for member in module.modules()):
                self._read_module(module)
        for name in sorted(self.escaped) if self.overwrites_unknown else ():
            self.refuse_result(name, f"{self.overwrites_unknown}, perhaps")
        for name, proof in self.proofs.items():
            if proof.reason is None and not proof.callers:
                holders = [parent for parent in self.names if self.model.get_submodule(name) in parent.children()]
                inside = f" ({type(holders[0]).__name__})" if holders else ""
                proof.reason = f"no code that calls it was found{inside}"

    def _read_module(self, module: nn.Module) -> None:
        if module in self.site_names:
            return
        if is_rewired(module):
            self.expose(module, f"{self.label(module)} does not run its class's plain forward")
            return
        self.result_of_forward(module)
        if module is self.model or any(child in self.site_names for child in module.children()):
            self.call_every_method(module)

    def call_every_method(self, module: nn.Module) -> None:
        """Reads all methods that the user wrote; those for building and saving do not run during a step."""
        if catalog.is_builtin(module) and not _has_own_methods(module):
            return
        for cls in type(module).__mro__:
            if not catalog.is_library(cls) and not cls.__module__.startswith("torch.nn.modules.container"):
                for name, entry in vars(cls).items():
                    if name not in catalog.SETUP_METHODS and _is_method(entry):
                        self._run(module, cls, name)

    def result_of_forward(self, module: nn.Module) -> tuple[str | None, frozenset[Mod]]:
        """Why what ``module`` returns is not its caller's to overwrite (None: it is), and whose hooks see it."""
        if catalog.is_sequential(module):
            return self._run_sequential(module)
        if type(module).forward.__qualname__.startswith("_forward_unimplemented"):
            return f"comes from {self.label(module)}, which has no forward", frozenset()
        return self.call_method(module, "forward")

    def call_method(self, module: nn.Module, name: str, start: type | None = None) -> tuple[str | None, frozenset[Mod]]:
        """The same for a method; ``start`` is the class to look for it in, for ``super()``."""
        mro = type(module).__mro__
        for cls in mro[mro.index(start) :] if start else mro:
            if name in vars(cls):
                if catalog.is_library(cls) or not _is_method(vars(cls)[name]):
                    break
                return self._run(module, cls, name)
        return f"comes from {self.label(module)}.{name}(), which is not followed", frozenset()

    def _run(self, module: nn.Module, cls: type, name: str) -> tuple[str | None, frozenset[Mod]]:
        key = (vars(cls)[name], module)
        if key not in self._results:
            self._results[key] = (f"comes from {self.label(module)}, which calls itself", frozenset())
            try:
                function = self._source(cls, name)
                interpreter = Interpreter(self, function, module)
                interpreter.run()
            except UnreadableError as problem:
                self.expose(module, f"{type(module).__name__}.{name} {problem}")
                self.overwrites_unknown = self.overwrites_unknown or f"{type(module).__name__}.{name}"
                self._results[key] = (f"comes from {self.label(module)}.{name}, which {problem}", frozenset())
            except Exception as error:  # a gap in this reader must cost a site, never the user's run
                self.expose(
                    module, f"{type(module).__name__}.{name} could not be read ({type(error).__name__}: {error})"
                )
                self.overwrites_unknown = self.overwrites_unknown or f"{type(module).__name__}.{name}"
                self._results[key] = (f"comes from {self.label(module)}.{name}, which could not be read", frozenset())
            else:
                self._results[key] = _summary(interpreter, module)
        return self._results[key]

    def _source(self, cls: type, name: str) -> Function:
        entry = vars(cls)[name]
        if entry not in self._sources:
            try:
                self._sources[entry] = read(cls, name)
            except UnreadableError as problem:
                self._sources[entry] = problem
        found = self._sources[entry]
        if isinstance(found, UnreadableError):
            raise found
        return found

    def _run_sequential(self, module: nn.Module) -> tuple[str | None, frozenset[Mod]]:
        key = (nn.Sequential.forward, module)
        if key not in self._results:
            self._results[key] = (f"comes from {self.label(module)}, which contains itself", frozenset())
            chain = Tensors(self, module, self.label(module), nn.Sequential.forward.__code__)
            value = foreign(f"is the caller's: it stands first in {self.label(module)}")
            for index, child in enumerate(module.children()):
                value = chain.call_module(child, [value], False, (module, index), self.label(module))
            chain.returned(value, self.label(module))
            self._results[key] = _summary(chain, module)
        return self._results[key]


def _summary(run: Tensors, module: nn.Module) -> tuple[str | None, frozenset[Mod]]:
    reason = next((reason for reason, _ in run.returns if reason is not None), None)
    return reason, frozenset(origin for _, origins in run.returns for origin in origins) | {Mod(module)}


def _is_method(entry: Any) -> bool:
    if isinstance(entry, staticmethod | classmethod):
        return False
    return isinstance(entry, types.FunctionType | property) or hasattr(entry, "__wrapped__") or hasattr(entry, "func")


def _has_own_methods(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.")
