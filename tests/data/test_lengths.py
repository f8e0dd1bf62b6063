"""The lengths of a dataset's texts: as it says, or counted where that costs little and leaves no trace."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.data import grouped_loader as module
from lightning_accel.data.grouped_loader import UncountedError, lengths_of


class Texts:
    """Texts of 1, 2, 3, … tokens."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": list(range(index + 1))}


class Saying(Texts):
    def __init__(self, lengths: Any) -> None:
        super().__init__(3)
        self.lengths = lengths

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it says its lengths, and need not be read")


class InColumns(Texts):
    """As Hugging Face's datasets are: a column by its name, a sample by its number."""

    column_names = ("input_ids", "length")

    def __getitem__(self, index: int | str) -> Any:
        assert index == "length"
        return [7, 8, 9]


def test_samples_are_counted_where_nothing_says_their_lengths() -> None:
    assert lengths_of(Texts()).tolist() == list(range(1, 41))


@pytest.mark.parametrize("lengths", [[5, 2, 9], (5, 2, 9), np.array([5, 2, 9]), torch.tensor([5, 2, 9])])
def test_a_dataset_may_say_its_lengths(lengths: Any) -> None:
    assert lengths_of(Saying(lengths)).tolist() == [5, 2, 9]


def test_a_column_says_them() -> None:
    assert lengths_of(InColumns(3)).tolist() == [7, 8, 9]


def test_part_of_a_dataset_has_the_lengths_of_its_samples() -> None:
    assert lengths_of(Subset(Saying([5, 2, 9]), [2, 0])).tolist() == [9, 5]  # type: ignore[arg-type]
    assert lengths_of(Subset(Texts(), [3, 0])).tolist() == [4, 1]  # type: ignore[arg-type]


def test_what_is_called_so_and_is_something_else_is_passed_over() -> None:
    texts: Any = Texts(3)
    texts.length, texts.lengths = 3, ["short", "long", "long"]
    assert lengths_of(texts).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "sentences",
    [[[3, 2], [4], [1, 1]], torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bfloat16)],
    ids=["ragged", "trained", "bfloat16"],
)
def test_what_is_called_so_and_is_no_array_is_passed_over(sentences: Any) -> None:
    texts: Any = Texts(3)
    texts.lengths = sentences
    assert lengths_of(texts).tolist() == [1, 2, 3]


def test_lengths_of_a_dataset_without_a_number_of_samples_are_not_known() -> None:
    class Unsized:
        lengths = (5, 2, 9)

    with pytest.raises(UncountedError, match="has no len"):
        lengths_of(Unsized())


class Cropped(Texts):
    def __getitem__(self, index: int) -> Any:
        return {"input_ids": list(range(int(torch.randint(1, 9, ())) + random.randrange(3)))}


class CroppedLate(Texts):
    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [0] * (index if index < 35 else int(torch.randint(1, 9, ())))}


class Counting(Texts):
    def __getitem__(self, index: int) -> Any:
        self.asked = getattr(self, "asked", 0) + 1
        return super().__getitem__(index)


class OwnStream(Texts):
    """Draws from a generator that no look at the global ones would see."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [0] * int(self.random.integers(1, 9))}


class Slow(Texts):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


class Broken(Texts):
    def __getitem__(self, index: int) -> Any:
        raise OSError("no such file")


class Tuples(Texts):
    def __getitem__(self, index: int) -> Any:
        return [1, 2], 3


class InBatches(Texts):
    def __getitem__(self, index: int) -> Any:
        return {"input_ids": torch.ones(1, 5)}


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Cropped(), "draw random numbers"),
        (CroppedLate(), "some of its samples draw random numbers"),
        (Counting(), "change as they are read"),
        (OwnStream(), "change as they are read"),
        (Slow(1_000_000), "to read its 1,000,000 samples would take about"),
        (Broken(), "OSError: no such file"),
        (Tuples(), "a sample is no mapping with input_ids, but of type tuple"),
        (InBatches(), r"have the shape \(1, 5\), not \(length,\)"),
    ],
)
def test_what_is_not_counted_has_its_reason_and_its_mend_and_no_stream_is_drawn_from(dataset: Texts, why: str) -> None:
    before = StateSnapshot(None, Level.RANDOM, torch.device("cpu"))
    with pytest.raises(UncountedError, match=f"{why}.*a column or an attribute `lengths`"):
        lengths_of(dataset)
    assert not before.drawn()


def test_counting_ends_where_later_samples_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowLater(Texts):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01 if index >= 50 else 0)
            return super().__getitem__(index)

    monkeypatch.setattr(module, "_SURE_S", 0.05)
    monkeypatch.setattr(module, "_MOST_S", 0.1)
    with pytest.raises(UncountedError, match="to read its 90 samples would take about"):
        lengths_of(SlowLater(90))


def test_a_dataset_that_gives_several_samples_at_a_time_is_asked_so() -> None:
    class AtATime(Texts):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("that takes longer")

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [super(AtATime, self).__getitem__(index) for index in indices]

    assert lengths_of(AtATime()).tolist() == list(range(1, 41))
