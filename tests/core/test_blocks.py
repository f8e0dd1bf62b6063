"""The repeated blocks of a model are found by themselves, or by the names a user gives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core.blocks import find_blocks, repeated_blocks, units
from support.models import ResidualBlock, TinyCNN, TinyTransformer, TransformerBlock


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{index}" for index in range(count)]


class Encoder(nn.Module):
    """A stem, two stages of blocks each, a head: as vision models are written."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.stage1 = nn.Sequential(*[ResidualBlock(8) for _ in range(3)])
        self.stage2 = nn.Sequential(*[ResidualBlock(8) for _ in range(3)])
        self.head = nn.Linear(8, 4)


class Shared(nn.Module):
    """One layer, listed three times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        layer = TransformerBlock()
        self.layers = nn.ModuleList([layer, layer, layer])


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"left": TransformerBlock(), "right": TransformerBlock()})


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = TinyTransformer()


def plain_sequentials() -> nn.Module:
    def part() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU())

    return nn.Sequential(nn.Linear(2, 4), part(), part(), part(), nn.Linear(4, 2))


FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a residual network": (TinyCNN, names("blocks", 2)),
    "a transformer": (TinyTransformer, names("layers", 3)),
    "a transformer inside a module": (Wrapped, names("model.layers", 3)),
    "stages of blocks": (Encoder, [*names("stage1", 3), *names("stage2", 3)]),
    "torch's own encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 4),
        names("layers", 4),
    ),
    "one layer listed three times": (Shared, ["layers.0"]),
    "a ModuleDict": (Named, ["parts.left", "parts.right"]),
    "Sequentials of the same layers": (plain_sequentials, ["1", "2", "3"]),
    "no block at all": (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []),
    "layers that are leaves": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []),
    "a single block": (lambda: nn.Sequential(nn.Linear(2, 2), TransformerBlock()), []),
    "a leaf": (lambda: nn.Linear(2, 2), []),
    "an empty module": (nn.Module, []),
}


@pytest.mark.parametrize(("make_model", "sites"), FOUND.values(), ids=FOUND)
def test_the_repeated_blocks_are_found(make_model: Callable[[], nn.Module], sites: list[str]) -> None:
    model = make_model()
    found = repeated_blocks(model)
    assert sorted(found) == sorted(sites)
    assert all(model.get_submodule(site) is block for site, block in found.items())


@pytest.mark.parametrize(
    ("wanted", "sites"),
    [
        (["ResidualBlock"], [*names("stage1", 3), *names("stage2", 3)]),
        (["stage1"], ["stage1"]),
        (["stage1.0", "stage2.2"], ["stage1.0", "stage2.2"]),
        (["stage1", "ResidualBlock"], ["stage1", *names("stage2", 3)]),
        (["Sequential"], ["stem", "stage1", "stage2"]),
        (["stem.0"], ["stem.0"]),
    ],
)
def test_blocks_are_named_by_class_or_path_and_never_nest(wanted: list[str], sites: list[str]) -> None:
    assert sorted(find_blocks(Encoder(), wanted)) == sorted(sites)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("ResidualBlok", r"No block matches 'ResidualBlok'; did you mean 'ResidualBlock'\? Blocks are class names"),
        ("stage1.9", r"No block matches 'stage1\.9'; did you mean 'stage1\.\d'\?"),
        ("zzz", r"No block matches 'zzz'\. Blocks are class names or module paths; this model has, among others: "),
        ("", r"No block matches ''\."),
    ],
)
def test_a_block_that_matches_nothing_is_an_error_that_names_the_nearest(wanted: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_blocks(Encoder(), [wanted])


def test_a_compiled_part_is_found_by_the_name_it_has_now() -> None:
    model = Wrapped()
    model.model = torch.compile(model.model, backend="eager")  # type: ignore[assignment]
    assert sorted(repeated_blocks(model)) == names("model._orig_mod.layers", 3)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)


class Mixed(nn.Module):
    """A stem, a stack, a neck that occurs once, a head of one layer, and a list that nobody can call."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(ResidualBlock(), ResidualBlock())
        self.neck = Perceptron()
        self.head = nn.Linear(8, 4)
        self.scales = nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])


class Listed(nn.Module):
    """Calls the layers of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)])


class Trained(nn.Module):
    """As a LightningModule with its layers right in it: the forward that it has by itself is called by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.net = nn.Linear(8, 8), nn.GELU(), Perceptron()

    def training_step(self) -> None: ...


class TrainedByForward(Perceptron):
    def training_step(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


UNITS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a stack": (TinyTransformer, names("layers", 3)),
    "what stands beside a stack": (Mixed, ["stem", "blocks.0", "blocks.1", "neck"]),
    "a model that is one part itself": (Perceptron, [""]),
    "the network of a module with training steps": (Trained, ["net"]),
    "a module with training steps, and a forward for them": (TrainedByForward, [""]),
    "layers in a list": (lambda: nn.Sequential(Listed(), nn.Linear(8, 1)), ["0"]),
    "a single layer": (lambda: nn.Linear(2, 2), []),
    "activations without weights": (lambda: nn.Sequential(nn.ReLU(), nn.Dropout()), []),
}


@pytest.mark.parametrize("case", UNITS)
def test_units_are_the_blocks_and_the_other_parts_of_several_layers(case: str) -> None:
    make, expected = UNITS[case]
    model = make()
    found = units(model)
    assert list(found) == expected
    assert all(model.get_submodule(name) is module for name, module in found.items())
