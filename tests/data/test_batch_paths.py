"""Which part of a batch is meant, what becomes of the rest, and what is said where it is not evident."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_accel.data import (
    ColorJitter,
    CutMix,
    Map,
    MixUp,
    Normalize,
    Preprocess,
    RandomHorizontalFlip,
    RandomResizedCrop,
    batch_paths,
)

pytestmark = pytest.mark.numbers

IMAGE, LABEL, NAMES = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4), ["a", "b", "c", "d"]
Named = namedtuple("Named", "image label")


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True)
class FrozenSample:
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedSample:
    image: Any
    label: Any


CONTAINERS: list[tuple[Any, batch_paths.Path]] = [
    (IMAGE, ()),
    ((IMAGE, LABEL), (0,)),
    ([LABEL, IMAGE], (1,)),
    ({"image": IMAGE, "label": LABEL, "names": NAMES, "none": None}, ("image",)),
    ({"views": [{"image": IMAGE}, "text"], 7: LABEL}, ("views", 0, "image")),
    (OrderedDict(x=IMAGE, y=LABEL), ("x",)),
    (UserDict(x=IMAGE, y=LABEL), ("x",)),
    (Named(IMAGE, LABEL), (0,)),
    (Sample(IMAGE, LABEL), ("image",)),
    (FrozenSample(IMAGE, LABEL), ("image",)),
    (SlottedSample(IMAGE, LABEL), ("image",)),
    ((Sample({"x": IMAGE}, LABEL), 3), (0, "image", "x")),
]


@pytest.mark.parametrize(("batch", "path"), CONTAINERS, ids=lambda value: type(value).__name__)
def test_the_one_image_is_found_in_any_container(batch: Any, path: batch_paths.Path) -> None:
    assert batch_paths.find_image(batch, "Test") == path
    assert batch_paths.get(batch, path) is IMAGE


@pytest.mark.parametrize(("batch", "path"), CONTAINERS, ids=lambda value: type(value).__name__)
def test_a_part_is_put_into_a_copy_of_the_containers_on_its_way(batch: Any, path: batch_paths.Path) -> None:
    other = torch.ones(1)
    changed = batch_paths.put(batch, path, other)
    assert type(changed) is (type(batch) if path else torch.Tensor)
    assert batch_paths.get(changed, path) is other
    assert batch_paths.get(batch, path) is IMAGE
    rest = [(place, part) for place, part in batch_paths.parts_of(batch) if place != path]
    assert [place for place, _ in batch_paths.parts_of(changed)] == [place for place, _ in batch_paths.parts_of(batch)]
    assert all(batch_paths.get(changed, place) is part for place, part in rest)


def test_a_mapping_that_cannot_be_written_to_gives_one_that_holds_the_part() -> None:
    changed = batch_paths.put(MappingProxyType({"x": IMAGE, "y": LABEL}), ("x",), LABEL)
    assert changed["x"] is LABEL
    assert changed["y"] is LABEL


# -- through a chain ---------------------------------------------------------------------------------------------------


def parts_in(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (Sample, FrozenSample, SlottedSample)):
        return batch.image, batch.label
    image, label = batch.values() if hasattr(batch, "values") else batch
    return image, label


def names(transforms: list[Any]) -> str:
    return "-".join(type(transform).__name__ for transform in transforms)


ALL = [
    [RandomHorizontalFlip(1)],
    [ColorJitter(0.5)],
    [RandomResizedCrop(5), Normalize(0.5, 0.25)],
    [Normalize(0.5, 0.25), MixUp(1.0, 5)],
    [CutMix(1.0, 5)],
    [Map(lambda xp, batch: batch)],
]


@pytest.mark.parametrize("transforms", ALL, ids=names)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: {"x": x, "y": y},
        lambda x, y: OrderedDict(x=x, y=y),
        lambda x, y: UserDict(x=x, y=y),
        Named,
        Sample,
        FrozenSample,
        SlottedSample,
    ],
)
def test_a_batch_of_any_structure_comes_back_as_one_of_tensors_and_is_itself_unchanged(
    transforms: list[Any], wrap: Any
) -> None:
    image, label = torch.randint(0, 256, (8, 3, 6, 6), dtype=torch.uint8), torch.arange(8) % 5
    values = image.clone(), label.clone()
    batch = wrap(image, label)
    result = Preprocess(transforms, seed=0)(batch)
    assert type(result) is type(batch)
    assert all(isinstance(part, Tensor) for part in parts_in(result))
    assert parts_in(batch)[0] is image
    assert parts_in(batch)[1] is label
    assert torch.equal(image, values[0])
    assert torch.equal(label, values[1])
    expected = Preprocess(transforms, seed=0)((image, label))
    assert all(torch.equal(*pair) for pair in zip(parts_in(result), expected, strict=True))


# -- what is evident ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_image_has_four_dimensions_of_uint8_or_floating_point(dtype: torch.dtype) -> None:
    batch = (LABEL, torch.rand(4, 3), torch.zeros(4, 1, 8, 8).long(), IMAGE.to(dtype))
    assert batch_paths.find_image(batch, "Test") == (3,)


def test_an_array_of_the_user_s_own_can_be_the_image() -> None:
    assert batch_paths.find_image({"x": np.zeros((2, 3, 4, 4), np.uint8)}, "Test") == ("x",)


@pytest.mark.parametrize("batch", [(IMAGE, IMAGE.float()), (torch.rand(4, 3), LABEL), None, {}, "text", [1, 2]])
def test_where_no_image_is_evident_the_error_says_what_the_batch_holds(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"^Crop: which part of the batch is the image is not evident") as caught:
        batch_paths.find_image(batch, "Crop")
    assert batch_paths.described(batch) in str(caught.value)
    assert "Name it with key=" in str(caught.value)


def test_a_batch_is_described_by_place_dtype_and_shape() -> None:
    batch = {"image": IMAGE, "more": (LABEL, "text", None, np.zeros(3, np.float32))}
    assert batch_paths.described(batch) == (
        "['image']: uint8 (4, 3, 8, 8), ['more'][0]: int64 (4,), ['more'][1]: str, ['more'][2]: NoneType,"
        " ['more'][3]: float32 (3,)"
    )


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ((torch.rand(4, 5), LABEL), (0,)),
        ((torch.rand(4, 5, 6), torch.rand(4)), (0,)),
        ((IMAGE.float(), torch.rand(4, 10)), (0,)),  # soft labels beside an image
        ((IMAGE, torch.rand(4, 10)), (1,)),
    ],
)
def test_the_features_are_the_image_of_floating_point_or_the_one_part_of_it(batch: Any, path: batch_paths.Path) -> None:
    assert batch_paths.find_features(batch, "Test") == path


def test_two_parts_of_features_are_not_evident() -> None:
    with pytest.raises(ValueError, match=r"2 parts could be it among \[0\]: float32 \(4, 5\), \[1\]: float32"):
        batch_paths.find_features((torch.rand(4, 5), torch.rand(4, 6)), "Whiten")


@pytest.mark.parametrize(
    ("rest", "num_classes", "place"),
    [
        ((LABEL,), 10, 1),
        ((LABEL.to(torch.uint8),), 10, 1),
        ((torch.rand(4, 10),), None, 1),
        ((torch.rand(4, 7), torch.rand(4, 10)), 10, 2),
        ((torch.arange(5), LABEL, torch.rand(4)), 10, 2),
        ((LABEL, torch.rand(4, 10)), 10, 1),
    ],
)
def test_the_label_is_an_integer_or_a_row_of_probabilities_per_sample(rest: Any, num_classes: Any, place: int) -> None:
    assert batch_paths.find_label((IMAGE, *rest), "MixUp", (0,), num_classes) == (place,)


@pytest.mark.parametrize("rest", [(), (LABEL, LABEL + 1), (torch.rand(4),), (torch.rand(4, 3), torch.rand(4, 5))])
def test_where_no_label_is_evident_the_error_names_the_setting_that_tells(rest: Any) -> None:
    with pytest.raises(ValueError, match=r"MixUp: which part of the batch is the label is not evident.*label_key="):
        batch_paths.find_label((IMAGE, *rest), "MixUp", (0,), None)


# -- what is named -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "key", "path"),
    [
        ({"x": IMAGE}, "x", ("x",)),
        ({0: IMAGE}, 0, (0,)),
        ((LABEL, IMAGE), 1, (1,)),
        ((LABEL, IMAGE), -1, (-1,)),
        ({"a": [Sample(IMAGE, 0)]}, ("a", 0, "image"), ("a", 0, "image")),
        (IMAGE, (), ()),
    ],
)
def test_a_key_an_index_or_a_path_names_a_part(batch: Any, key: Any, path: batch_paths.Path) -> None:
    assert batch_paths.named(batch, key, "Test") == path
    assert batch_paths.get(batch, path) is IMAGE


def test_a_misspelt_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"Crop: the batch has no \['imgae'\]; did you mean 'image'\? It has \['image'\]"
    ):
        batch_paths.named({"image": IMAGE, "label": LABEL}, "imgae", "Crop")


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ((IMAGE,), 1),
        ((IMAGE,), "image"),
        (Sample(IMAGE, 0), "img"),
        (Sample(IMAGE, 0), 0),
        ({"a": (IMAGE,)}, ("a", 3)),
        (None, "x"),
        ({"x": IMAGE}, ["x"]),
    ],
)
def test_a_key_that_the_batch_does_not_have_is_answered_with_what_it_has(batch: Any, key: Any) -> None:
    with pytest.raises(ValueError, match=r"Crop: the batch has no \[.*It has ") as caught:
        batch_paths.named(batch, key, "Crop")
    assert batch_paths.described(batch) in str(caught.value)


def test_a_key_of_something_that_is_no_tensor_is_refused_with_its_type() -> None:
    with pytest.raises(TypeError, match=r"Crop: \['names'\] of the batch is of type list, not a tensor"):
        batch_paths.named({"names": NAMES}, "names", "Crop")


def test_an_index_into_a_batch_that_is_one_tensor_does_not_name_its_first_sample() -> None:
    with pytest.raises(ValueError, match=r"Crop: the batch has no \[0\]"):
        batch_paths.named(IMAGE, 0, "Crop")
