"""In-place activations: which modules, which of their calls, and that everything else stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core.host import Host
from lightning_accel.techniques.inplace_activations import InplaceActivations
from support.techniques.inplace_activations.inplace_harness import (
    CPU,
    GPU,
    assert_same_training,
    converted,
)
from support.techniques.inplace_activations.inplace_models import Temporary

pytestmark = pytest.mark.numbers

SAVING = [nn.ReLU, nn.LeakyReLU, nn.RReLU, nn.Dropout]
ROUNDING = [nn.ELU, nn.CELU, nn.SELU]
COPYING = [nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.SiLU, nn.Mish, lambda: nn.Threshold(0.1, 0.2)]
CHANNELS = [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d]


def between_linears(act: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8))


def named(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


# Which modules


@pytest.mark.parametrize("kind", SAVING, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_activation_between_linear_layers_works_in_place(kind: Any, dtype: torch.dtype) -> None:
    made = assert_same_training(between_linears(kind()).to(dtype), torch.randn(4, 8, dtype=dtype))

    assert made.in_place == {"1": 3}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [*((kind, "copies its input") for kind in COPYING), *((kind, "its rounded result") for kind in ROUNDING)],
    ids=named,
)
def test_an_activation_that_gains_nothing_or_rounds_differently_is_left_alone_in_training(
    kind: Any, reason: str
) -> None:
    """PyTorch's in-place form clones the input; that of the ELU family starts its backward from ``exp(x) - 1``."""
    model = between_linears(kind())

    made = assert_same_training(model, torch.randn(4, 8))

    assert made.in_place == {}
    (patch,) = made.patches
    assert reason in patch.change


@pytest.mark.parametrize("kind", [*SAVING[:-1], *ROUNDING, *COPYING], ids=named)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_gradients_every_activation_works_in_place(kind: Any, mode: Any, dtype: torch.dtype) -> None:
    model = between_linears(kind()).to(dtype).eval()
    x = torch.randn(64, 8, dtype=dtype)
    expected = model(x)

    with mode(), converted(model) as made:
        assert torch.equal(model(x), expected)

    assert made.in_place == {"1": 1}


@pytest.mark.parametrize("kind", CHANNELS, ids=named)
def test_dropout_of_whole_channels(kind: Any) -> None:
    dims = int(kind.__name__[-2])
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]

    made = assert_same_training(nn.Sequential(conv(3, 4, 1), kind()), torch.randn(2, 3, *[4] * dims))

    assert made.in_place == {"1": 3}


@pytest.mark.parametrize(
    "act",
    [nn.ReLU(inplace=True), nn.AlphaDropout(), nn.GELU(), nn.Sigmoid(), nn.PReLU()],
    ids=lambda act: type(act).__name__,
)
def test_what_is_no_site(act: nn.Module) -> None:
    """Already in place, or with an ``inplace`` that its forward ignores, or without one."""
    assert list(InplaceActivations().sites(between_linears(act), CPU)) == []


@pytest.mark.parametrize(
    ("act", "setting"),
    [(nn.LeakyReLU(-0.1), "negative_slope"), (nn.RReLU(-0.2, 0.1), "lower")],
    ids=["leaky", "random"],
)
def test_settings_that_forbid_a_backward_in_place(act: nn.Module, setting: str) -> None:
    made = assert_same_training(between_linears(act), torch.randn(4, 8))

    assert setting in made.refused["1"]


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_is_not_even_asked_for_and_of_everything_is(p: float) -> None:
    made = assert_same_training(between_linears(nn.Dropout(p)), torch.randn(4, 8), steps=1)

    assert made.in_place == ({"1": 1} if p else {})
    assert made.as_it_was == {}


def test_dropout_in_evaluation_is_not_asked_for() -> None:
    made = assert_same_training(between_linears(nn.Dropout()).eval(), torch.randn(4, 8))

    assert (made.in_place, made.as_it_was) == ({}, {})


def test_elementwise_dropout_on_a_gpu_is_left_alone() -> None:
    """There the fused kernel keeps one byte an element; in place, PyTorch keeps a full mask and draws other numbers."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(), nn.Conv2d(4, 4, 1), nn.Dropout2d())

    with converted(model, host=GPU) as made:
        assert [patch.site for patch in made.patches] == ["3"]

    assert "GPU" in made.refused["1"]


def test_a_subclass_that_keeps_the_forward_is_a_site_and_one_with_its_own_is_none() -> None:
    class Same(nn.ReLU):
        pass

    class Other(nn.ReLU):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + input

    made = assert_same_training(
        nn.Sequential(nn.Linear(8, 8), Same(), nn.Linear(8, 8), Other()), torch.randn(4, 8), steps=1
    )

    assert made.in_place == {"1": 1}
    assert made.as_it_was == {}


def test_sites_can_be_skipped_with_a_reason() -> None:
    model = nn.Sequential(between_linears(nn.ReLU()), between_linears(nn.ReLU()))

    with converted(model, skip={"0": "inside a checkpointed block"}) as made:
        assert made.refused == {"0.1": "inside a checkpointed block"}
        assert [patch.site for patch in made.patches] == ["1.1"]


def test_host_is_only_asked_for_its_kind() -> None:
    (patch,) = InplaceActivations().sites(Temporary(), Host(kind="mps", device_name="a Mac"))

    assert patch.site == "act"


# LeakyReLU and RReLU: in place, their backward needs the result


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("kind", [nn.LeakyReLU, nn.RReLU], ids=named)
@pytest.mark.parametrize(
    "rest", [[], [Overwriting()], [nn.Identity(), Overwriting()], [nn.ReLU(inplace=True)]], ids=len
)
def test_a_result_that_somebody_may_overwrite_is_not_needed_by_backward(kind: Any, rest: list[nn.Module]) -> None:
    made = assert_same_training(nn.Sequential(nn.Linear(8, 8), kind(), *rest), torch.randn(4, 8))

    assert made.in_place == {}


def test_a_result_is_followed_out_of_a_sequential_and_into_the_next() -> None:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.LeakyReLU()) for _ in range(3)]

    made = assert_same_training(nn.Sequential(*blocks), torch.randn(2, 3, 4, 4), steps=1)

    assert made.in_place == {"0.1": 1, "1.1": 1}


def test_a_slice_of_a_sequential_ends_where_it_ends() -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            h = self.body[:2](x)
            h += 1
            return self.body[2](h)

    assert assert_same_training(Sliced(), torch.randn(4, 8)).in_place == {}


def test_a_hook_on_what_reads_the_result_may_overwrite_it() -> None:
    model = between_linears(nn.LeakyReLU())
    model[2].register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))

    assert assert_same_training(model, torch.randn(4, 8)).in_place == {}


def test_leaky_relu_halves_what_is_saved_for_backward() -> None:
    def saved_bytes(model: nn.Module) -> int:
        pending, sizes = [model(torch.randn(256, 64)).grad_fn], {}
        while pending:
            if (node := pending.pop()) is None:
                continue
            for name in dir(node):
                if name.startswith("_saved_") and isinstance(value := getattr(node, name), Tensor):
                    sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            pending += [below for below, _ in node.next_functions]
        return sum(sizes.values())

    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.LeakyReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    plain = saved_bytes(model)
    with converted(model):
        activation = 256 * 64 * 4
        assert plain - saved_bytes(model) == 8 * activation
