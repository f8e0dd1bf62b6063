"""What a local name may hold while a ``forward`` is read: tensors made here, somebody else's, modules, functions."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Fresh:
    """A tensor that the expression ``key`` computes, with storage of its own.

    In a loop the same expression makes a tensor every turn. ``is_old`` stands for all those of earlier turns.
    """

    key: Hashable
    is_old: bool = False


@dataclass(frozen=True)
class Foreign:
    """A value that is not ours to overwrite, with the reason in words that follow "its input …"."""

    reason: str
    is_tensor: bool = True


@dataclass(frozen=True, eq=False)
class _Identity:
    target: Any

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.target is other.target

    def __hash__(self) -> int:
        return id(self.target)


class Mod(_Identity):
    """A module of the model."""


class Known(_Identity):
    """A Python module, function or class, found through the globals of the code that is read."""


@dataclass(frozen=True)
class Many:
    """Something that yields modules: a slice of an ``nn.ModuleList``, ``self.children()``."""

    modules: frozenset[Mod]


@dataclass(frozen=True)
class Method:
    """A method of a module, not called yet."""

    module: Mod
    name: str


Value: TypeAlias = "frozenset[Fresh | Foreign | Mod | Known | Many | Method]"
NOTHING: Value = frozenset()  # numbers, strings, None


def foreign(reason: str, is_tensor: bool = True) -> Value:
    return frozenset({Foreign(reason, is_tensor)})


@dataclass(frozen=True)
class Facts:
    """What has happened to a fresh tensor so far, on some path.

    Attributes:
        spoiled: Why it can no longer be overwritten, though nothing has overwritten it.
        consumers: The sites that it went through; were they in place, its contents would be gone.
        parents: Tensors that it may be the same as (dropout hands its input through in evaluation), each with the
            sites on the way.
        origins: The modules whose hooks get to see it.
        result_of: The activation sites that computed it.
    """

    spoiled: str | None = None
    consumers: frozenset[str] = frozenset()
    parents: frozenset[tuple[Fresh, frozenset[str]]] = frozenset()
    origins: frozenset[Mod] = frozenset()
    result_of: frozenset[str] = frozenset()

    def joined(self, other: Facts) -> Facts:
        return Facts(
            spoiled=self.spoiled or other.spoiled,
            consumers=self.consumers | other.consumers,
            parents=self.parents | other.parents,
            origins=self.origins | other.origins,
            result_of=self.result_of | other.result_of,
        )


@dataclass
class State:
    """What each name may hold, and what has happened to each tensor, at one point of a function."""

    names: dict[str, Value] = field(default_factory=dict)
    facts: dict[Fresh, Facts] = field(default_factory=dict)

    def copy(self) -> State:
        return State(dict(self.names), dict(self.facts))

    def absorb(self, other: State) -> None:
        """Becomes the state that holds on either of two paths."""
        for name, value in other.names.items():
            self.names[name] = self.names.get(name, NOTHING) | value
        for tensor, facts in other.facts.items():
            self.facts[tensor] = self.facts[tensor].joined(facts) if tensor in self.facts else facts

    def create(self, key: Hashable, facts: Facts) -> Fresh:
        """A new tensor; what the same expression made before, in an earlier turn of a loop, stays apart from it."""
        tensor = Fresh(key)
        if tensor in self.facts:
            self._retire(tensor)
        self.facts[tensor] = facts
        return tensor

    def _retire(self, tensor: Fresh) -> None:
        old = Fresh(tensor.key, is_old=True)
        past = self.facts.pop(tensor)
        self.facts[old] = past.joined(self.facts.get(old, Facts(spoiled="is from an earlier turn of a loop")))
        self.facts[old] = replace(
            self.facts[old], spoiled=self.facts[old].spoiled or "is from an earlier turn of a loop"
        )
        for name, value in self.names.items():
            if tensor in value:
                self.names[name] = (value - {tensor}) | {old}
        for other, facts in self.facts.items():
            if any(parent == tensor for parent, _ in facts.parents):
                parents = frozenset((old if parent == tensor else parent, via) for parent, via in facts.parents)
                self.facts[other] = replace(facts, parents=parents)

    def update(self, tensor: Fresh, **changes: Any) -> None:
        self.facts[tensor] = replace(self.facts[tensor], **changes)

    def identities(self, tensor: Fresh) -> Iterator[tuple[Fresh, frozenset[str]]]:
        """``tensor`` and every tensor it may be the same as, each with the sites passed on the way."""
        pending: list[tuple[Fresh, frozenset[str]]] = [(tensor, frozenset())]
        seen: set[Fresh] = set()
        while pending:
            current, via = pending.pop()
            if current not in seen:
                seen.add(current)
                yield current, via
                pending += [(parent, via | sites) for parent, sites in self.facts[current].parents]


def join(states: Iterable[State | None]) -> State | None:
    """The state after several paths meet; None (unreachable) when none arrives."""
    joined: State | None = None
    for state in states:
        if state is not None:
            if joined is None:
                joined = state.copy()
            else:
                joined.absorb(state)
    return joined


def join_statements(states: Iterable[State | None]) -> State | None:
    """The same between two statements, where only names hold tensors: what no name holds on a path is dead there.

    So ``if self.act is not None: x = self.act(x)`` does not mix up the ``x`` of one path with that of the other.
    """
    return join(state if state is None else _alive(state) for state in states)


def _alive(state: State) -> State:
    held = [item for value in state.names.values() for item in value if isinstance(item, Fresh)]
    alive = {same for tensor in held for same, _ in state.identities(tensor)}
    return State(state.names, {tensor: facts for tensor, facts in state.facts.items() if tensor in alive})
