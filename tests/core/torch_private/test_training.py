"""What breaks when a torch drops one of the private names around a model in training, in plain words: a test a name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lightning_accel.core.torch_private.training import (
    check_all_reduced,
    hold_device,
    map_parts,
    optimizer_states,
    told_of_loading,
)


def test_check_reducer_finalized_names_the_step_that_left_parameters_out(tmp_path: Path) -> None:
    """Without it ``accel_ddp`` fails a step later, after the optimizer has stepped with each rank's own gradients."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        wrapped = DistributedDataParallel(nn.Sequential(*layers))
        wrapped(torch.ones(1, 2)).sum().backward()
        check_all_reduced(wrapped)
        wrapped(torch.ones(1, 2))
        layers[0](torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="finished reduction"):
            check_all_reduced(wrapped)
    finally:
        torch.distributed.destroy_process_group()


def test_a_gradient_scaler_knows_its_optimizers_until_it_is_updated() -> None:
    """Else float16 training ends at its first step: unscaled gradients could not wait for theirs."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert list(optimizer_states(scaler)) == [id(optimizer)]
    assert [list(state["found_inf_per_device"]) for state in optimizer_states(scaler).values()] == [
        [torch.device("cpu")]
    ]
    scaler.update()
    assert not optimizer_states(scaler)


def test_pytree_numbers_nested_loaders_as_lightning_does() -> None:
    """Without it batches of several loaders are not preprocessed where the user has a hook of their transfer."""
    parts = map_parts(lambda number, part: (number, part), {"b": [1, [2]], "a": 3}, {"b": ["x", "y"], "a": "z"})
    assert parts == {"b": [(0, 1), (1, [2])], "a": (2, 3)}


def test_a_device_is_held_for_half_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the name no step is held back, and a GPU's idle time is in the other parts of its steps."""
    cycles: list[int] = []
    assert callable(torch.cuda._sleep)
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    hold_device(1.5)
    hold_device(60_000)
    assert cycles == [3_000_000, 1_000_000_000]


def test_loading_samples_is_told_apart_from_making_a_batch_of_them() -> None:
    """Else all of loading is taken to grow with the batch, and larger batches are promised less than they bring."""
    told: list[str] = []

    class Told(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            told.append("sample")
            return index

    def collate(samples: list[int]) -> list[int]:
        told.append("collated")
        return samples

    batches = iter(DataLoader(Told(), batch_size=2, sampler=range(6), collate_fn=collate))
    next(batches)
    with told_of_loading(lambda took_ms: told.append("loaded")):
        assert next(batches) == [2, 3]
    next(batches)
    before, during, after = ["sample", "sample", "collated"], ["sample", "sample", "loaded", "collated"], told[7:]
    assert told == [*before, *during, *after]
    assert after == before
