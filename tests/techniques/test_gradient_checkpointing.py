"""Checkpointing forgets activations and changes nothing else: numbers, random streams, statistics, state_dict."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.assembly import accelerate
from lightning_accel.engine import AccelError, AccelWarning, Engine
from lightning_accel.host import Host
from lightning_accel.plan import CheckpointingPlan, OffloadingPlan, Plan
from lightning_accel.techniques.gradient_checkpointing import GradientCheckpointing, MemoryBudget
from models import TASKS, ResidualBlock, Task, TinyCNN, TinyTransformer, TransformerBlock

MODES = ["full", "selective"]
MATMULS = {"mm", "addmm", "bmm"}

# What is refused everywhere though it was asked for is said as a warning too; tests/test_engine.py holds that.
pytestmark = pytest.mark.filterwarnings("ignore:.* is not in force anywhere")


def checkpointed(model: nn.Module, mode: str = "full", blocks: list[str] | None = None, **settings: Any) -> Engine:
    setting: Any = {"mode": mode, "blocks": blocks} if blocks else mode
    host = settings.pop("host", None)
    quiet: dict[str, Any] = {"precision": "32-true", "memory_format": "preserve", "inplace_activations": False}
    quiet["flash_attention"] = "off"  # whose trial goes by the clock
    return accelerate(model, Plan(**{**quiet, **settings}, gradient_checkpointing=setting), host=host)


class CountingOperators(TorchDispatchMode):
    """Counts the operators that run while it is active, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def matmuls(self) -> int:
        return sum(self.count[name] for name in MATMULS)


def backward_counts(model: nn.Module, task: Task, handle: Engine | None, steps: int = 2) -> Counter[str]:
    """The operators of the last step's backward pass: its own, and those it recomputes."""
    for step in range(steps):
        inputs, targets = task.batch(step)
        with handle.step() if handle else nullcontext():
            loss = task.loss(model(inputs), targets)
        with CountingOperators() as counting:
            loss.backward()
    return counting.count


def saved_bytes(model: nn.Module, task: Task, handle: Engine | None, steps: int = 2) -> int:
    """The bytes that one step's forward pass keeps for its backward pass, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for step in range(steps):
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs, targets = task.batch(step)
        with handle.step() if handle else nullcontext(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = task.loss(model(inputs), targets)
        loss.backward()
    return sum(kept.values())


# -- counted -------------------------------------------------------------------------------------------------------

BIG = Task(
    lambda: TinyTransformer(dim=32, blocks=6, dropout=0.0),
    lambda step: TASKS["transformer"].batch(step),
    TASKS["transformer"].loss,
)


def test_full_recomputes_every_matrix_product_once_and_selective_none() -> None:
    counts = {}
    for mode in (None, *MODES):
        model = BIG.model()
        handle = checkpointed(model, mode) if mode else None
        counts[mode] = backward_counts(model, BIG, handle)
    matmuls = {mode: sum(count[name] for name in MATMULS) for mode, count in counts.items()}
    # A block's six (qkv, two of attention, proj, two of the mlp), less the last one: nothing needs its output again.
    assert matmuls["full"] - matmuls[None] == 6 * 5
    assert matmuls["selective"] == matmuls[None]
    assert counts["selective"]["gelu"] == counts["full"]["gelu"] == 6
    assert counts[None]["gelu"] == 0


def test_full_saves_only_what_enters_a_block() -> None:
    model = BIG.model()
    plain = saved_bytes(BIG.model(), BIG, None)
    full = saved_bytes(model, BIG, checkpointed(model))
    assert full < 0.3 * plain


def test_selective_keeps_convolutions_and_recomputes_the_norms() -> None:
    counts = {}
    for mode in (None, *MODES):
        model = TASKS["cnn"].model()
        counts[mode] = backward_counts(model, TASKS["cnn"], checkpointed(model, mode) if mode else None)
    assert {mode: count["convolution"] for mode, count in counts.items()} == {None: 0, "full": 4, "selective": 0}
    assert {mode: count["native_batch_norm"] for mode, count in counts.items()} == {None: 0, "full": 4, "selective": 4}


# -- same numbers --------------------------------------------------------------------------------------------------


@dataclass
class Boxed:
    hidden: Tensor
    note: str = ""


class Pair(NamedTuple):
    hidden: Tensor
    extra: Tensor


class Base(nn.Module):
    """A block of one linear layer and dropout; its kin differ in what they take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.gelu(self.linear(x)))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class KeywordsOnly(Base):
    def forward(
        self, *, hidden: Tensor, scale: float = 1.0, debug: bool = False, determinism_check: str = ""
    ) -> Tensor:
        return scale * self.inner(hidden)


class ReturnsTuple(Base):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x), None, {"norm": x.norm(), "count": 3}


class ReturnsDataclass(Base):
    def forward(self, x: Any) -> Any:
        return Boxed(self.inner(x), "made here")


class ReturnsNamedTuple(Base):
    def forward(self, x: Any) -> Any:
        return Pair(self.inner(x), x.detach())


class TakesNested(Base):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"states": [self.inner(batch["states"][0])], "mask": batch["mask"]}


class Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)


class FunctionalDropout(Base):
    def inner(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(x), 0.5, self.training)


class Spectral(Base):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.linear)


class Nested(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))

    def inner(self, x: Tensor) -> Tensor:
        return self.inside(x)


class SecondOrder(Base):
    """Uses a gradient in its forward pass, as force fields and gradient penalties do."""

    def inner(self, x: Tensor) -> Tensor:
        energy = self.linear(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + 0.01 * force


def _autocast(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return block(x).float()


def _autocast_twice(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return block(block(x).float()).float()


class Chain(nn.Module):
    """Blocks one after the other, called as ``call`` calls one."""

    def __init__(self, kind: type[nn.Module], call: Callable[[nn.Module, Tensor], Tensor], times: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.call = call
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.times):
            for block in self.blocks:
                x = self.call(block, x)
        return x


def mask() -> Tensor:
    return torch.ones(3, dtype=torch.bool)


CHAINS: dict[str, Callable[[], Chain]] = {
    "plain": lambda: Chain(Base, lambda b, x: b(x)),
    "called several times": lambda: Chain(Base, lambda b, x: b(x), times=3),
    "keywords only": lambda: Chain(
        KeywordsOnly, lambda b, x: b(hidden=x, scale=0.5, debug=True, determinism_check="x")
    ),
    "returns a tuple with None and a dict": lambda: Chain(ReturnsTuple, lambda b, x: b(x)[0] / b(x)[2]["norm"]),
    "returns a dataclass": lambda: Chain(ReturnsDataclass, lambda b, x: b(x).hidden),
    "returns a namedtuple": lambda: Chain(ReturnsNamedTuple, lambda b, x: b(x).hidden),
    "takes a nested dict": lambda: Chain(TakesNested, lambda b, x: b({"states": [x], "mask": mask()})["states"][0]),
    "frozen parameters": lambda: Chain(Frozen, lambda b, x: b(x)),
    "functional dropout": lambda: Chain(FunctionalDropout, lambda b, x: b(x)),
    "parametrised weights": lambda: Chain(Spectral, lambda b, x: b(x)),
    "blocks with parts": lambda: Chain(Nested, lambda b, x: b(x)),
    "a gradient inside forward": lambda: Chain(SecondOrder, lambda b, x: b(x)),
    "autocast inside forward": lambda: Chain(Base, lambda b, x: _autocast(b, x)),
}


def trained(model: nn.Module, handle: Engine | None, steps: int = 3) -> dict[str, Tensor]:
    """Weights and buffers after some steps, and the random number drawn next."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for step in range(steps):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with handle.step() if handle else nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return {**copy.deepcopy(model.state_dict()), "next random": torch.rand(1)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_every_kind_of_block_trains_to_the_very_same_weights(make: Callable[[], Chain], mode: str) -> None:
    """To the last bit, and with the same random stream after every step: dropout is replayed, not drawn again."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    expected, actual = trained(plain, None), trained(model, handle)
    assert handle.report.applied("gradient_checkpointing") == ["blocks.0", "blocks.1"]
    handle.undo()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "batch norm with a cumulative average": lambda: nn.BatchNorm1d(8, momentum=None),
    "batch norm without statistics": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "sync batch norm in evaluation": lambda: nn.SyncBatchNorm(8).eval(),
    "instance norm with statistics": lambda: _Unsqueezed(nn.InstanceNorm1d(8, track_running_stats=True)),
    "frozen statistics": lambda: nn.BatchNorm1d(8).eval(),
}


class _Unsqueezed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unsqueeze(-1).expand(-1, -1, 4) * torch.arange(4.0)).mean(-1)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make_norm", NORMS.values(), ids=NORMS)
def test_running_statistics_move_once_a_step_as_without_checkpointing(
    make_norm: Callable[[], nn.Module], mode: str
) -> None:
    """Recomputing a block passes its batch through the norms again; mean, variance and count must not notice."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Normed(make_norm()), Normed(make_norm()))
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    expected, actual = trained(plain, None), trained(model, handle)
    assert handle.report.applied("gradient_checkpointing") == ["1", "2"]
    handle.undo()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [getattr(m, "momentum", None) for m in model.modules()] == [
        getattr(m, "momentum", None) for m in plain.modules()
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_kept_can_be_walked_twice(mode: str) -> None:
    plain = TASKS["cnn"].model()
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    for net, context in ((plain, nullcontext()), (model, handle.step())):
        inputs, targets = TASKS["cnn"].batch()
        with context:
            loss = F.cross_entropy(net(inputs), targets)
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol=0, atol=0
    )
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives_pass_through(mode: str) -> None:
    plain = CHAINS["blocks with parts"]().eval()
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    found = []
    for net, context in ((plain, nullcontext()), (model, handle.step())):
        x = torch.ones(2, 8, requires_grad=True)
        with context:
            energy = net(x).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        slope.square().sum().backward()
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_checkpointed(no_gradients: Callable[[], Any]) -> None:
    plain = TASKS["transformer"].model().eval()
    model = copy.deepcopy(plain)
    handle = checkpointed(model)
    tokens = TASKS["transformer"].batch()[0]
    with no_gradients(), handle.step("validate"):
        assert torch.equal(model(tokens), plain(tokens))
    handle.undo()


def test_a_validation_before_the_first_step_is_not_taken_for_the_trial() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Counting(), Counting())
    handle = checkpointed(model)
    with torch.no_grad():
        for stage in ("validate", "train"):
            with handle.step(stage):
                model(torch.ones(2, 8))
    with handle.step():
        model(torch.ones(2, 8))
    assert set(handle.report.refused("gradient_checkpointing")) == {"1", "2"}


@pytest.mark.parametrize("mode", MODES)
def test_a_block_called_twice_in_an_autocast_region_meets_no_cast_that_its_recomputation_would_miss(mode: str) -> None:
    """The second call finds its weights in autocast's cache; recomputed alone, it has to cast them."""
    torch.manual_seed(0)
    plain = Chain(Base, _autocast_twice)
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    expected, actual = trained(plain, None), trained(model, handle)
    assert handle.report.applied("gradient_checkpointing") == ["blocks.0", "blocks.1"]
    handle.undo()
    torch.testing.assert_close(actual, expected, rtol=0.03, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_an_autocast_region_of_the_users_around_the_model_keeps_its_gradients(mode: str) -> None:
    """A trial's casts, made under no_grad and kept in autocast's cache, would cut the weights off."""
    plain = TASKS["cnn"].model()
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode, memory_format="channels_last")
    inputs, targets = TASKS["cnn"].batch()
    for net, context in ((plain, nullcontext()), (model, handle.step())):
        with context, torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
    handle.undo()
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol=0.05, atol=0.02
    )


# -- refused -------------------------------------------------------------------------------------------------------


class Counting(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().inner(x)


class Remembering(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {"last": None}

    def inner(self, x: Tensor) -> Tensor:
        self.seen["last"] = x.detach()
        return super().inner(x)


class Averaging(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def inner(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().inner(x)


class Overwriting(Base):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x.mul_(2.0))


class Gambling(Base):
    """Drops itself by Python's own random, which checkpointing does not replay."""

    def inner(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else super().inner(x)


class OldSpectral(Base):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.linear)


class Graph:
    """A batch object of the user's, as graph libraries have it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class OnGraphs(Base):
    def forward(self, graph: Graph) -> Graph:
        graph.x = self.inner(graph.x)
        return graph


class IntoDict(Base):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["x"] = self.inner(batch["x"])
        return batch


class Mute(Base):
    def forward(self, x: Tensor) -> None:
        return None


REFUSED: dict[str, tuple[Callable[[], Chain], str]] = {
    "a counter": (lambda: Chain(Counting, lambda b, x: b(x)), "its forward changes 'calls'"),
    "a dict": (lambda: Chain(Remembering, lambda b, x: b(x)), "its forward changes 'seen'"),
    "a buffer": (lambda: Chain(Averaging, lambda b, x: b(x)), "its forward changes 'mean'"),
    "its input": (lambda: Chain(Overwriting, lambda b, x: b(x)), "modified in place"),
    "python's random": (lambda: Chain(Gambling, lambda b, x: b(x)), "(other |its forward changes 'random'|failed)"),
    "power iteration": (lambda: Chain(OldSpectral, lambda b, x: b(x)), "(other |changes 'linear.parametrizations)"),
    "an object of the user's": (lambda: Chain(OnGraphs, lambda b, x: b(Graph(x)).x), "takes a Graph"),
    "a dict it is given": (lambda: Chain(IntoDict, lambda b, x: b({"x": x})["x"]), "(other |failed)"),
    "nothing at all": (lambda: Chain(Mute, lambda b, x: b(x) or x), "returns no tensors"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_block_that_a_second_run_would_change_is_refused_and_the_run_is_the_plain_one(
    make: Callable[[], Chain], reason: str, mode: str
) -> None:
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    random.seed(3)
    expected = trained(plain, None)
    random.seed(3)
    actual = trained(model, handle)
    refused = handle.report.refused("gradient_checkpointing")
    assert set(refused) == {"blocks.0", "blocks.1"}
    assert all(re.search(reason, why) for why in refused.values()), refused
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [getattr(b, "calls", 0) for b in model.blocks] == [getattr(b, "calls", 0) for b in plain.blocks]


def test_a_torchscript_block_is_refused_and_nothing_left_is_a_warning() -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(Normed(nn.LayerNorm(8)) for _ in range(2)))
    for index in (1, 2):
        with pytest.warns(DeprecationWarning, match="jit"):
            model[index] = torch.jit.script(model[index])
    with pytest.warns(AccelWarning, match="asked for and found no site: a TorchScript module"):
        checkpointed(model, blocks=["1", "2"]).undo()


def attention(dropout: float) -> nn.Module:
    return nn.MultiheadAttention(8, 2, dropout=dropout)


@pytest.mark.parametrize(
    ("dropping", "plain"),
    [
        (nn.Dropout(0.1), nn.Dropout(0.0)),
        (nn.Dropout2d(0.1), nn.Identity()),
        (nn.RReLU(), nn.LeakyReLU()),
        (attention(0.1), attention(0.0)),
    ],
)
def test_on_an_apple_gpu_blocks_that_draw_random_numbers_are_left_alone(dropping: nn.Module, plain: nn.Module) -> None:
    """There torch does not bring them back for the recomputation, and the gradient would silently be another's."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), dropping), nn.Sequential(nn.Linear(8, 8), plain))
    handle = checkpointed(model, blocks=["0", "1"], host=Host(kind="mps", device_name="M3"))
    assert list(handle.report.refused("gradient_checkpointing")) == ["0"]
    assert handle.report.applied("gradient_checkpointing") == ["1"]
    handle.undo()
    handle = checkpointed(model, blocks=["0", "1"])
    assert handle.report.applied("gradient_checkpointing") == ["0", "1"]
    handle.undo()


@pytest.mark.parametrize(
    ("host", "full", "budget"),
    [
        (Host(kind="xla", device_name="TPU"), "torch_xla.utils.checkpoint", "torch_xla.utils.checkpoint"),
        (Host(kind="mps", device_name="M3"), None, "gradient_checkpointing='selective' or 'full'"),
        (Host(kind="rocm", device_name="MI300X"), None, None),
    ],
)
def test_where_it_saves_nothing_it_says_why_and_what_does(host: Host, full: str | None, budget: str | None) -> None:
    plan, in_budget = CheckpointingPlan(mode="full"), CheckpointingPlan(budget="1GiB")
    reason = GradientCheckpointing(plan).unavailable(host)
    budget_reason = MemoryBudget(in_budget, OffloadingPlan(to="off"), torch.device("cpu")).unavailable(host)
    for found, mend in ((reason, full), (budget_reason, budget)):
        assert found is None if mend is None else mend in (found or "")


def test_lazy_blocks_are_refused_until_they_are_made() -> None:
    model = nn.Sequential(nn.Linear(4, 8), *(nn.Sequential(nn.LazyLinear(8), nn.ReLU()) for _ in range(2)))
    with pytest.warns(AccelWarning, match="has lazy parameters: run the model once before"):
        checkpointed(model).undo()
    model(torch.ones(2, 4))
    handle = checkpointed(model)
    assert handle.report.applied("gradient_checkpointing") == ["1", "2"]
    handle.undo()


# -- the blocks ----------------------------------------------------------------------------------------------------


def test_a_shared_block_is_checkpointed_once_and_serves_every_call() -> None:
    layer = TransformerBlock(8)
    plain = nn.Sequential(nn.Linear(8, 8), layer, layer, layer)
    model = copy.deepcopy(plain)
    handle = checkpointed(model)
    actual, expected = [], []
    for net, context, found in ((plain, nullcontext(), expected), (model, handle.step(), actual)):
        torch.manual_seed(5)
        with context:
            loss = net(torch.ones(2, 3, 8)).square().mean()
        loss.backward()
        found += [p.grad for p in net.parameters()]
    assert handle.report.applied("gradient_checkpointing") == ["1"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("blocks", "sites"),
    [(["ResidualBlock"], ["blocks.0", "blocks.1"]), (["blocks.1"], ["blocks.1"]), (["stem", "head"], ["stem", "head"])],
)
def test_blocks_may_be_named(blocks: list[str], sites: list[str]) -> None:
    handle = checkpointed(TinyCNN(), blocks=blocks)
    assert handle.report.applied("gradient_checkpointing") == sites
    handle.undo()


def test_a_misnamed_block_is_an_error_and_the_model_is_untouched() -> None:
    model = TinyCNN()
    with pytest.raises(ValueError, match=r"No block matches 'ResidualBlok'; did you mean 'ResidualBlock'\?"):
        checkpointed(model, blocks=["blocks.0", "ResidualBlok"], memory_format="channels_last")
    assert not any("forward" in vars(m) for m in model.modules())
    assert model.stem.weight.is_contiguous()


def test_a_model_without_blocks_is_an_error_that_shows_how_to_name_some() -> None:
    with pytest.raises(ValueError, match=r"gradient_checkpointing='full': Linear has no repeated blocks.*'blocks': \["):
        checkpointed(nn.Linear(2, 2))


def test_strict_makes_an_error_of_finding_nothing() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(8), nn.ReLU()) for _ in range(2)))
    with pytest.raises(AccelError, match="found no site"):
        checkpointed(model, strict=True)


def test_a_block_inside_another_technique_of_ours_is_not_checkpointed_twice() -> None:
    model = TASKS["cnn"].model()
    first = checkpointed(model)
    with pytest.warns(AccelWarning, match="already checkpointed"):
        second = checkpointed(model)
    assert backward_counts(model, TASKS["cnn"], first)["convolution"] == 4
    second.undo()
    assert backward_counts(model, TASKS["cnn"], first)["convolution"] == 4
    first.undo()
    assert backward_counts(model, TASKS["cnn"], None)["convolution"] == 0


def test_untried_blocks_are_checkpointed_as_asked() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Normed(nn.LayerNorm(8)), Normed(nn.LayerNorm(8)))
    handle = checkpointed(model, verify=False)
    with handle.step():
        model(torch.ones(2, 8)).sum().backward()
    assert handle.report.applied("gradient_checkpointing") == ["1", "2"]
    handle.undo()


def test_a_residual_block_may_change_between_training_and_evaluation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), ResidualBlock(), ResidualBlock())
    handle = checkpointed(model)
    for training in (True, False, True):
        model.train(training)
        with handle.step():
            loss = model(torch.randn(2, 3, 4, 4)).sum()
        loss.backward()
    assert int(model[1].bn1.num_batches_tracked) == 2
    handle.undo()
