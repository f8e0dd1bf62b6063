"""Modules from the meta device start with the values that they would have been constructed with, or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.strategies.materialize import materialize

pytestmark = pytest.mark.numbers

CPU = torch.device("cpu")


def made(root: nn.Module, **options: bool) -> nn.Module:
    materialize(root, list(root.modules()), CPU, **options)
    return root


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)),
        lambda: nn.Conv2d(8, 64, 3),
        lambda: nn.BatchNorm2d(4),
        lambda: nn.Embedding(50, 8),
        lambda: nn.GRU(32, 32),
        lambda: nn.TransformerEncoderLayer(64, 2, 64),
    ],
)
def test_torch_s_layers_start_as_they_are_constructed(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        module = make()
    made(module)
    for (name, tensor), expected in zip(module.state_dict().items(), make().state_dict().values(), strict=True):
        assert tensor.shape == expected.shape
        if expected.unique().numel() > 1:  # drawn at random
            assert tensor.std().item() == pytest.approx(expected.std().item(), rel=0.3), name
        else:
            assert torch.equal(tensor, expected), name


def test_what_is_real_stays() -> None:
    module = nn.Linear(2, 2)
    before = module.weight
    assert made(module).weight is before


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_stay_tied_with_the_values_of_their_first_owner() -> None:
    with torch.device("meta"):
        module = Tied()
    made(module)
    assert module.head.weight is module.embedding.weight
    assert module.head.weight.std() > 0.8  # an embedding's; a linear layer's would be 0.2


def test_init_weights_of_the_model_around_has_the_last_word() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.fill_(7.0)

    with torch.device("meta"):
        module = Model()
    assert torch.equal(made(module).layer.weight, torch.full((4, 4), 7.0))  # type: ignore[union-attr, arg-type]


def test_init_weights_is_called_with_modules_that_only_hold_others() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Pair):
                module.second.weight.fill_(7.0)

    with torch.device("meta"):
        module = Model()
    made(module)
    assert torch.equal(module.pair.second.weight, torch.full((4, 4), 7.0))
    assert module.pair.first.weight.std() > 0


class Masked(nn.Module):
    """Its mask is there from the constructor alone."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril(), persistent=persistent)

    def _init_weights(self, module: nn.Module) -> None:
        """Does not know of the mask."""


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_nothing_fills_is_refused(persistent: bool) -> None:
    with torch.device("meta"):
        module = Masked(persistent)
    with pytest.raises(
        ValueError, match=r"'mask' was made on the meta device, and nothing gives it a value. Give Masked"
    ):
        made(module)


def test_a_checkpoint_may_fill_what_it_holds_and_nothing_else() -> None:
    with torch.device("meta"):
        held, not_held = Masked(persistent=True), Masked(persistent=False)
    made(held, may_be_empty=True)
    with pytest.raises(ValueError, match=r"reset_parameters.*buffers\.$"):
        made(not_held, may_be_empty=True)


def test_frozen_parameters_stay_frozen() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2).requires_grad_(False)
    assert not any(p.requires_grad for p in made(module).parameters())


def test_parts_are_made_one_by_one() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    materialize(module, [module[0]], CPU)
    tensors: list[Tensor] = [module[0].weight, module[1].weight]  # type: ignore[list-item]
    assert [tensor.is_meta for tensor in tensors] == [False, True]
