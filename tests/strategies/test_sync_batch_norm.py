"""Batch norm over the ranks' batches is batch norm over one batch."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.strategies.sync_batch_norm import AnyDeviceSyncBatchNorm, GlobalBatchNorm
from support.scripts import SUPPORT, run_script
from support.strategies.batch_norm_ranks import CASES, fit, train

pytestmark = pytest.mark.numbers

WORLDS = (2, pytest.param(4, marks=pytest.mark.slow))

Folders = Callable[[int], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Where the runs of ``batch_norm_ranks.py`` left what each rank computed, by how many ranks there were."""

    @functools.cache
    def of(world_size: int) -> Path:
        folder = tmp_path_factory.mktemp("ranks")
        run_script(SUPPORT / "strategies" / "batch_norm_ranks.py", folder, str(world_size))
        return folder

    return of


def of_ranks(folder: Folders, case: str, world_size: int) -> list[Any]:
    return [torch.load(folder(world_size) / f"{case}.{world_size}.{rank}.pt") for rank in range(world_size)]


def whole(ranks: list[Any], what: str) -> list[Tensor]:
    """The two steps' tensors, put together from the ranks' rows."""
    return [torch.cat(parts) for parts in zip(*(rank[what] for rank in ranks), strict=True)]


def tolerance(case: str) -> dict[str, float]:
    if case == "bf16 autocast":
        return {"rtol": 2**-7, "atol": 2**-6}  # an output or two may be rounded the other way
    if case == "a large mean":
        return {"rtol": 2e-5, "atol": 2e-5}  # 100 in float32 has an ulp of 8e-6
    if case == "float64":
        return {"rtol": 1e-13, "atol": 1e-13}
    return {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.medium
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_several_processes_compute_what_one_does_on_the_global_batch(
    folder: Folders, case: str, world_size: int
) -> None:
    layer = CASES[case].layer()
    if isinstance(layer, nn.SyncBatchNorm):
        layer = nn.BatchNorm2d(layer.num_features)
    one, ranks = train(CASES[case], layer), of_ranks(folder, case, world_size)
    torch.testing.assert_close(whole(ranks, "outputs"), one["outputs"], **tolerance(case))
    torch.testing.assert_close(whole(ranks, "grads"), one["grads"], **tolerance(case))
    summed = {name: sum(rank["parameters"][name] for rank in ranks) for name in one["parameters"]}
    # Each is a sum over all the batch's values: in float32 of some 250 terms, in another order.
    torch.testing.assert_close(summed, one["parameters"], **{**tolerance(case), "atol": 10 * tolerance(case)["atol"]})
    for rank in ranks:
        of_state = tolerance("float32" if case == "bf16 autocast" else case)  # the statistics are float32 all the same
        torch.testing.assert_close(rank["state"], one["state"], **of_state)


@pytest.mark.medium
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_compiled_layer_computes_the_same(folder: Folders, world_size: int) -> None:
    plain = [rank["outputs"] for rank in of_ranks(folder, "(B, C, H, W)", world_size)]
    torch.testing.assert_close(of_ranks(folder, "compiled", world_size), plain, rtol=0, atol=0)


@pytest.mark.medium
@pytest.mark.parametrize("world_size", WORLDS)
def test_too_few_values_are_an_error_on_every_rank(folder: Folders, world_size: int) -> None:
    said = of_ranks(folder, "single value", world_size)
    expected = f"needs more than one value per channel; all {world_size} ranks together have 1 (this rank's input is of"
    assert all(expected in message for message in said)
    assert "(1, 3)" in said[0]
    assert "(0, 3)" in said[1]


# Under a Trainer


@pytest.mark.medium
def test_two_processes_train_as_one_on_the_same_global_batch(folder: Folders) -> None:
    one = fit(1)
    for rank in of_ranks(folder, "fit", 2):
        assert "GlobalBatchNorm" in rank["during"]
        torch.testing.assert_close(rank["state"], one.state_dict(), rtol=1e-5, atol=1e-6)
        assert rank["after"] == repr(one)


# The layers of a model


def network() -> nn.Module:
    shared = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), shared), nn.BatchNorm1d(4, affine=False), shared)


def test_names_and_tensors_of_the_state_stay() -> None:
    model = network()
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    AnyDeviceSyncBatchNorm().apply(model)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def test_the_users_own_modules_come_back_with_the_statistics_of_the_run() -> None:
    model = network()
    before = dict(model.named_modules())
    AnyDeviceSyncBatchNorm().apply(model)
    model(torch.randn(8, 4))
    assert AnyDeviceSyncBatchNorm().revert(model.eval()) is model
    assert dict(model.named_modules()) == before
    assert model[1].num_batches_tracked == 1
    assert not model[1].training


def test_tensors_that_were_exchanged_in_the_meantime_come_back() -> None:
    model = AnyDeviceSyncBatchNorm().apply(network())
    state = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    torch.testing.assert_close(AnyDeviceSyncBatchNorm().revert(model).state_dict(), state)


def test_a_module_in_two_places_stays_one() -> None:
    model = AnyDeviceSyncBatchNorm().apply(network())
    assert isinstance(model[2], GlobalBatchNorm)
    assert model[0][1] is model[2]


def test_a_batch_norm_itself_is_replaced_and_given_back() -> None:
    plain = nn.BatchNorm1d(4)
    layer = AnyDeviceSyncBatchNorm().apply(plain)
    assert isinstance(layer, GlobalBatchNorm)
    assert AnyDeviceSyncBatchNorm().apply(layer) is layer
    assert AnyDeviceSyncBatchNorm().revert(layer) is plain


def test_hooks_on_the_users_layer_run() -> None:
    plain, seen = nn.BatchNorm1d(4), []
    handle = plain.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    layer = AnyDeviceSyncBatchNorm().apply(plain)
    layer(torch.randn(8, 4))
    handle.remove()
    layer(torch.randn(8, 4))
    assert seen == [(8, 4)]


def test_a_copy_is_of_its_own_and_can_be_given_back_too() -> None:
    """As averages of weights keep one."""
    model = AnyDeviceSyncBatchNorm().apply(network())
    duplicate = copy.deepcopy(model)
    duplicate(torch.randn(8, 4))
    assert (int(duplicate[1].num_batches_tracked), int(model[1].num_batches_tracked)) == (1, 0)
    assert AnyDeviceSyncBatchNorm().revert(duplicate)[1].num_batches_tracked == 1


def test_a_model_can_be_pickled() -> None:
    model = AnyDeviceSyncBatchNorm().apply(network())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False).state_dict(), model.state_dict())


def test_without_a_process_group_it_is_a_plain_batch_norm() -> None:
    case = CASES["(B, C, H, W)"]
    torch.testing.assert_close(
        train(case, AnyDeviceSyncBatchNorm().apply(case.layer())), train(case, case.layer()), rtol=0, atol=0
    )


def test_a_batch_norm_that_computes_otherwise_is_left_alone_and_named() -> None:
    class NormAndActivation(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    model = nn.Sequential(NormAndActivation(4))
    with pytest.warns(UserWarning, match="NormAndActivation computes in a forward of its own"):
        AnyDeviceSyncBatchNorm().apply(model)
    assert type(model[0]) is NormAndActivation


def test_an_input_of_too_few_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2D"):
        AnyDeviceSyncBatchNorm().apply(nn.BatchNorm1d(4))(torch.randn(4))
