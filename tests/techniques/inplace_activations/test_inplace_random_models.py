"""Models drawn at random: residuals, views, saved results, branches, lists, closures, generators. No bit may differ."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.techniques.inplace_activations.inplace_harness import converted, train

pytestmark = pytest.mark.numbers

_ACTS = "relu leaky drop relu6 elu seq shared"
# {v}: the variable that is written; {a}, {b}: variables that are there; |: a line ends.
_STATEMENTS = """
{v} = self.{act}({a})
{v} = self.{act}({v})
{a} = self.{act}({a})
{v} = self.{act}(self.{layer}({a}))
{v} = self.{layer}(self.{act}({a}))
{v} = self.{layer}({a}); {v} = self.{act}({v}); {v} = self.{layer}({v})
{v} = self.{layer}({a})
{v} = {a} + {b}
{v} = {a} * {b}
{v} = {a} * 1
{v} = {a}
{v}, {a} = self.{act}({a}), {b}
{v} = {a}.sigmoid()
{v} = self.{act}({a}.tanh())
{v} = self.{act}(({a} * 0.5).exp())
{v} = {a}.view(-1).view(4, 8)
{v} = {a}.detach() + {b}
{v} = {a}.t().contiguous().t()
{v} = self.{act}(torch.cat([{a}[:, :4], {b}[:, 4:]], dim=1))
{v} = torch.cat([{a}[:, :4], {b}[:, 4:]], 1)
{a} += {b}
{v} = {a} * 1; {v} += {b}; {v} = self.{act}({v})
seen.append({a})
seen.append({a} * 2); {v} = self.{act}(seen[-1])
{v} = self.{act}(seen.pop() if seen else {a})
self.kept = {a}; {v} = self.{act}(self.kept)
self.kept = {a} * 1
{v} = self.kept + {b}
{v} = self.{act}({a}) if {b}.sum() > 0 else {b}
{v} = self.{act}({a} if {b}.sum() > 0 else {b})
{v} = self.{act}({v} := {a} * 1) if False else self.{act}({a})
if {a}.mean() > 0: {v} = self.{act}({b} * 1)
for _ in range(2): {v} = self.{act}({a})
for _ in range(2): {a} = self.{act}({a})
{v} = (lambda t: self.{act}(t))({a})
{v} = (lambda t: self.{act}(t) + t)({a} * 1)
late.append(lambda t={a}: t * 0.5)
late.append(lambda: {a} * 0.5)
{v} = sum(self.{act}(t) for t in [{a}, {b}])
{v} = sum([self.{act}(t * 1) for t in ({a}, {b})])
{v} = next(map(self.{act}, [{a}]))
{v} = self.helper({a}, self.{act})
{v} = self.method({a})
{v} = self.method({a} * 1)
{v} = self.wrapped({a})
{v} = self.wrapped({a}) + {a}
act = self.{act}; {v} = act({a} * 1)
act = self.{act}; {v} = act({a})
act = self.{act}; {a} = act({a})
{v} = self.{act}.forward({a})
{v} = self.{act}.__call__({a})
{v} = torch.utils.checkpoint.checkpoint(self.{act}, {a}, use_reentrant=False)
{v} = self.body({a})
{v} = self.body[:2]({a})
{v} = self.body({a}); {v} += 1
for layer in self.body: {v} = layer({a}); {a} = {v}
with torch.no_grad(): {v} = self.{act}({a})
with torch.no_grad(): {v} = self.{act}({a} * 1)
try: {v} = self.{act}({a}) | finally: {b} = {a} + 1
""".strip().split("\n")


class Drawn(nn.Module):
    """What a drawn forward has at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.relu, self.leaky, self.relu6, self.elu = nn.ReLU(), nn.LeakyReLU(), nn.ReLU6(), nn.ELU()
        self.drop, self.shared = nn.Dropout(0.3), self.relu
        self.seq = nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU())
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.3))
        self.kept: Any = 1.0

    def helper(self, t: Tensor, act: nn.Module) -> Tensor:
        return act(t)

    def method(self, t: Tensor) -> Tensor:
        t = self.leaky(t)
        t = self.q(t)
        return self.relu(t)

    def wrapped(self, t: Tensor) -> Tensor:
        return self.relu(t)


def draw(seed: int) -> str:
    """The source of a forward."""
    rng = random.Random(seed)
    lines, there = ["h = self.p(x)", "seen, late = [], []"], ["h", "x"]
    for _ in range(rng.randint(2, 7)):
        v = rng.choice(["h", "g", "k"])
        names = {"v": v if v in there else "h", "a": rng.choice(there), "b": rng.choice(there)}
        names |= {"act": rng.choice(_ACTS.split()), "layer": rng.choice(["p", "q", "norm"])}
        statement = rng.choice(_STATEMENTS)
        if statement.startswith("{v} =") and "{v}" not in statement[4:] and " if " not in statement:
            names["v"] = v
            there.append(v)
        lines += statement.format(**names).split(" | ")
    result = " + ".join(sorted(set(there)))
    lines += [f"result = {result}", "for part in (*seen, *(f() for f in late)): result = result + part"]
    lines += ["self.kept = 1.0", f"return self.{rng.choice(_ACTS.split())}(result)"]
    return "def forward(self, x):\n" + "".join(f"    {line}\n" for line in lines)


def outcome(model: nn.Module, x: Tensor) -> list[Tensor] | type[BaseException]:
    try:
        return train(model, x, steps=2)
    except RuntimeError as error:  # what is drawn may overwrite what its own backward needs
        return type(error)


def compare(seed: int) -> int:
    """How many calls of a drawn model were done in place, which changes nothing."""
    source, namespace = draw(seed), {"torch": torch}
    exec(source, namespace)
    torch.manual_seed(seed)
    model, x = type("Model", (Drawn,), {"forward": namespace["forward"]})(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with converted(model) as made:
        actual = outcome(model, x)
    expected = outcome(plain, x)
    if isinstance(actual, list) and isinstance(expected, list):
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), source
    else:
        assert actual is expected, source
    return sum(made.in_place.values())


def test_the_draw_has_both_what_is_safe_and_what_is_not() -> None:
    sources = "".join(draw(seed) for seed in range(300))

    assert all(word in sources for word in ("lambda", "seen", "kept", "next(map", "checkpoint", "no_grad", "finally"))


@pytest.mark.medium
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in (1, 2))])
def test_models_drawn_at_random_compute_the_same(block: int) -> None:
    in_place = sum(compare(seed) for seed in range(100 * block, 100 * block + 100))

    assert in_place > 100


@pytest.mark.slow
def test_two_thousand_more_do() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_place = sum(compare(seed) for seed in range(1000, 3000))

    assert in_place > 2000
