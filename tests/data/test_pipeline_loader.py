"""A pipeline stands for its loader: state, length, attributes, class, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sized
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler

from lightning_accel.data import Normalize, Preprocess
from lightning_accel.data.pipeline import DevicePipeline
from support.pipeline_loaders import (
    Counting,
    Numbers,
    Stream,
    Transform,
    double,
    no_thread_is_left,
    on_cpu,
)

pytestmark = pytest.mark.numbers

__all__ = ["no_thread_is_left"]
LONG_S = 30.0  # never reached, unless a test fails


# -- state ---------------------------------------------------------------------------------------------------------


def test_the_state_is_that_of_the_last_batch_handed_out() -> None:
    pipeline = on_cpu(Counting(6))
    seen = [pipeline.state_dict()["at"]]
    batches = iter(pipeline)
    seen.append(pipeline.state_dict()["at"])
    seen += [pipeline.state_dict()["at"] for _ in batches]
    assert seen == [0, 0, 1, 2, 3, 4, 5, 6]
    assert pipeline.state_dict() == {"at": 0}  # the loader's own, which has begun anew


def test_the_state_stays_after_breaking_off() -> None:
    pipeline = on_cpu(Counting(6))
    for batch in pipeline:
        if batch == 2:
            break
    pipeline.close()
    assert pipeline.state_dict() == {"at": 3}


def test_a_resumed_loader_gives_the_batches_that_were_not_consumed() -> None:
    pipeline = on_cpu(Counting(6))
    batches = iter(pipeline)
    assert [next(batches), next(batches)] == [0, 1]
    state = pipeline.state_dict()
    resumed = on_cpu(Counting(6))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == {"at": 2}
    assert list(resumed) == [2, 3, 4, 5]


def test_only_the_pipeline_of_a_loader_with_state_has_state() -> None:
    """As Lightning asks."""
    assert isinstance(on_cpu(Counting(1)), _Stateful)
    assert not isinstance(on_cpu(DataLoader(Numbers(1))), _Stateful)
    assert not hasattr(on_cpu(DataLoader(Numbers(1))), "state_dict")


# -- standing for the loader ---------------------------------------------------------------------------------------


def test_the_length_is_the_loaders() -> None:
    assert len(on_cpu(DataLoader(Numbers(7), batch_size=3))) == 3
    without = on_cpu(DataLoader(Stream(7)))
    with pytest.raises(TypeError, match="Stream"):
        len(without)
    assert isinstance(without, Sized)
    assert on_cpu(iter([]))  # true, as any object


def test_attributes_are_the_loaders_to_read_and_to_write() -> None:
    loader: Any = DataLoader(Numbers(7), batch_size=3, sampler=RandomSampler(range(7)))
    pipeline = on_cpu(loader)
    assert pipeline.dataset is loader.dataset
    assert pipeline.batch_size == 3
    pipeline._iterator = pipeline.new = 5
    assert loader._iterator == loader.new == 5
    del pipeline.new
    assert not hasattr(loader, "new")
    assert not hasattr(pipeline, "new")
    assert "batch_sampler" in dir(pipeline)
    with pytest.raises(ValueError, match="should not be set"):
        pipeline.batch_size = 1
    with pytest.raises(AttributeError, match=r"'loader'.*make a new one"):
        pipeline.loader = loader


def test_it_is_of_the_loaders_class_and_of_its_own() -> None:
    pipeline = on_cpu(DataLoader(Numbers(1)))
    assert isinstance(pipeline, DataLoader)
    assert isinstance(pipeline, DevicePipeline)
    assert not isinstance(on_cpu([]), DataLoader)


def test_a_pipeline_of_a_pipeline_has_its_loader() -> None:
    loader = Counting(2)
    outer = on_cpu(on_cpu(loader, Transform(double)), Transform(double))
    assert outer.loader is loader
    assert list(outer) == [0, 2]


def test_its_repr_names_the_loader_and_the_device() -> None:
    assert repr(on_cpu([1])) == "DevicePipeline([1], device='cpu', depth=2)"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
@pytest.mark.parametrize("loader", [[1, 2], Counting(2)], ids=["list", "stateful"])
def test_a_copy_is_a_pipeline(copied: Callable[[Any], Any], loader: Any) -> None:
    pipeline = on_cpu(loader, depth=3)
    other = copied(pipeline)
    assert type(other) is type(pipeline)
    assert "depth=3" in repr(other)
    assert len(list(other)) == 2


def test_a_copy_of_an_iteration_is_at_its_end() -> None:
    """Lightning copies a CombinedLoader under way with its iterators, and leaves out a DataLoader's."""
    combined = CombinedLoader([on_cpu([1, 2])], "sequential")
    next(iter(combined))
    copied = copy.deepcopy(combined)
    assert [item for item, *_ in copied] == [1, 2]


def test_a_list_of_transforms_is_made_a_chain_for_the_device() -> None:
    images = torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)
    (batch,) = DevicePipeline([images], "cpu", [Normalize(0.5, 0.5)])
    assert torch.equal(batch, torch.ones(2, 1, 4, 4))


def test_a_chain_for_another_device_is_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"device='meta'.* with a Preprocess for 'cpu'"):
        DevicePipeline([torch.ones(2)], "meta", Preprocess([Normalize(0.5, 0.5)]))
