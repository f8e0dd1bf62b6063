"""Transforms go to YAML and back without loss, and say what is wrong with what they cannot be made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_accel import data
from lightning_accel.data import (
    ColorJitter,
    CutMix,
    GaussianNoise,
    Map,
    MixUp,
    Normalize,
    Preprocess,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    SlidingWindow,
    Transform,
    Whiten,
)
from lightning_accel.data.transform import ArrayBatch
from lightning_accel.data.transform_config import read_transforms, written
from lightning_accel.settings import Plan

EVERY_KIND: list[Transform] = [
    Normalize(0.5, 0.25),
    Normalize((0.4, 0.5, 0.6), [0.1, 0.2, 0.3], dtype="float32", key="image"),
    RandomCrop(32, padding=4),
    RandomCrop((24, 32), key=("views", 0)),
    RandomResizedCrop(224, scale=(0.5, 1), ratio=[1, 1]),
    RandomHorizontalFlip(),
    RandomHorizontalFlip(0.25, key=0),
    ColorJitter(0.4, 0.3, 0.2, 0.1),
    RandomErasing(0.3, scale=(0.1, 0.2), value=1.0),
    MixUp(0.2, 10, label_key=("y", 1)),
    CutMix(1.0, num_classes=10, key="x"),
    GaussianNoise(0.1),
    GaussianNoise(cov=[[2, 0.5], [0.5, 1]]),
    GaussianNoise(cov=np.eye(3)),
    Whiten(np.zeros(2), np.eye(2)),
    Whiten(torch.zeros(3, 2), torch.eye(2).expand(3, 2, 2), key="features"),
    SlidingWindow(16, 4),
    Map(np.flip, key="x", training_only=True),
]


@dataclass(frozen=True, repr=False)
class Doubled(Transform):
    """A user's own transform."""

    times: float = 2.0

    def __call__(self, batch: ArrayBatch) -> None:
        batch.write((), batch.read(()) * self.times)


def test_every_kind_of_transform_is_tried_here() -> None:
    kinds = {getattr(data, name) for name in data.__all__}
    transforms = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Transform)} - {Transform}
    assert transforms == {type(transform) for transform in EVERY_KIND}


@pytest.mark.parametrize("transform", EVERY_KIND, ids=lambda transform: type(transform).__name__)
def test_every_transform_survives_yaml(transform: Transform) -> None:
    plan = Plan(preprocess=[transform])
    again = Plan.from_yaml(plan.to_yaml())
    assert again.preprocess == (transform,)
    assert again == plan
    assert hash(again.preprocess[0]) == hash(transform)


def test_a_chain_is_written_as_class_paths_with_what_is_no_default() -> None:
    plan = Plan(preprocess=[RandomCrop(32, padding=4), RandomHorizontalFlip()])
    assert yaml.safe_load(plan.to_yaml())["preprocess"] == [
        {"class_path": "lightning_accel.data.RandomCrop", "init_args": {"size": [32, 32], "padding": 4}},
        {"class_path": "lightning_accel.data.RandomHorizontalFlip", "init_args": {}},
    ]


@pytest.mark.parametrize(
    "class_path", ["RandomCrop", "lightning_accel.data.RandomCrop", "lightning_accel.data.geometry.RandomCrop"]
)
def test_a_transform_of_ours_goes_by_its_short_name_too(class_path: str) -> None:
    text = f"preprocess: [{{class_path: {class_path}, init_args: {{size: 4}}}}, {{class_path: RandomHorizontalFlip}}]"
    assert Plan.from_yaml(text).preprocess == (RandomCrop(4), RandomHorizontalFlip())


@pytest.mark.parametrize("value", [None, [], ()])
def test_no_transforms_are_no_transforms(value: Any) -> None:
    assert Plan(preprocess=value).preprocess == ()
    assert Plan.from_yaml("preprocess:").preprocess == ()


@pytest.mark.parametrize(
    ("entry", "error", "complaint"),
    [
        ("{class_path: RandomCorp}", ValueError, r"no transform 'RandomCorp'; did you mean 'RandomCrop'\?"),
        ("{class_path: Preprocess}", ValueError, "no transform 'Preprocess'"),
        ("{class_path: nowhere.at.All}", ValueError, "'nowhere.at.All' cannot be imported"),
        ("{class_path: collections.OrderedDict}", ValueError, "no transform 'collections.OrderedDict'"),
        ("{class_path: RandomCrop, init_args: {size: 4, pading: 1}}", ValueError, "did you mean 'padding'"),
        ("{class_path: RandomCrop}", TypeError, "RandomCrop.*missing.*'size'"),
        ("{class_path: RandomCrop, args: {size: 4}}", ValueError, "no setting 'args'"),
        ("{size: 4}", ValueError, "names no transform.*class_path"),
        ("RandomCrop", TypeError, "'RandomCrop' is of type str"),
        (
            "{class_path: RandomCrop, init_args: [4]}",
            (TypeError, ValueError),
            "RandomCrop.*init_args|init_args.*RandomCrop",
        ),
        ("{class_path: GaussianNoise, init_args: {std: 1e-3}}", (TypeError, ValueError), r"GaussianNoise\(std='1e-3'"),
        ("{class_path: Map, init_args: {fn: numpy.nothing}}", ValueError, r"Map\(fn\)='numpy.nothing' cannot be"),
        ("{class_path: Map, init_args: {fn: flip}}", ValueError, r"Map\(fn\)='flip' cannot be imported"),
    ],
)
def test_an_entry_that_is_wrong_is_answered_with_what_is_right(entry: str, error: Any, complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        Plan.from_yaml(f"preprocess: [{entry}]")


@pytest.mark.parametrize("value", ["RandomCrop", {"class_path": "RandomCrop"}, RandomCrop(4), 3])
def test_a_single_transform_is_no_list_of_them(value: Any) -> None:
    with pytest.raises(TypeError, match="Allowed: a list of transforms"):
        Plan(preprocess=value)


# -- what is the user's own --------------------------------------------------------------------------------------------


def test_a_function_goes_by_where_it_is_imported_from() -> None:
    text = "preprocess: [{class_path: Map, init_args: {fn: numpy.flip}}]"
    assert Plan.from_yaml(text).preprocess == (Map(np.flip),)
    assert "fn: numpy.flip" in Plan.from_yaml(text).to_yaml()


class Callable:
    """An object that is a function too."""

    def __call__(self, xp: Any, batch: Any) -> Any:
        return batch

    def method(self, xp: Any, batch: Any) -> Any:
        return batch


@pytest.mark.parametrize(
    "fn",
    [lambda xp, batch: batch, functools.partial(np.flip, axis=1), Callable(), Callable().method],
    ids=["lambda", "partial", "object", "method"],
)
def test_a_function_without_a_name_of_its_own_serves_but_is_not_written_down(fn: Any) -> None:
    plan = Plan(preprocess=[Map(fn)])
    with pytest.raises(ValueError, match=r"Map\(fn=.*cannot be written down"):
        plan.to_yaml()


def test_a_transform_of_the_user_s_own_goes_by_its_class_path() -> None:
    name = f"{__name__}.Doubled"
    entry = {"class_path": name, "init_args": {"times": 3.0}}
    assert written(Doubled(3.0)) == entry
    (again,) = read_transforms([entry])
    assert again == Doubled(3.0)
    assert Preprocess([again])(torch.ones(2)).tolist() == [3.0, 3.0]


def test_a_transform_of_a_class_that_cannot_be_imported_is_not_written_down() -> None:
    @dataclass(frozen=True, repr=False)
    class Local(Doubled):
        pass

    with pytest.raises(ValueError, match=r"Local.*cannot be written down"):
        written(Local())


@pytest.mark.parametrize(
    "transform",
    [
        lambda: RandomErasing(value=np.float32(0.5)),
        lambda: RandomHorizontalFlip(np.float64(0.25)),
        lambda: Normalize(np.float32(0.5), [np.float64(0.25)]),
        lambda: RandomHorizontalFlip(np.float32(0.25)),
        lambda: RandomCrop(np.int64(4)),
        lambda: Normalize(np.array([0.1, 0.2]), torch.tensor([0.3, 0.4])),
    ],
    ids=["value", "p", "mean", "p of float32", "size", "array"],
)
def test_numbers_of_numpy_are_numbers(transform: Any) -> None:
    plan = Plan(preprocess=[transform()])
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_a_transform_shows_what_was_set() -> None:
    assert repr(RandomCrop(32, padding=4, key="x")) == "RandomCrop(key='x', size=(32, 32), padding=4)"
    assert repr(RandomHorizontalFlip()) == "RandomHorizontalFlip()"
    assert eval(repr(RandomResizedCrop(8, scale=(0.5, 1)))) == RandomResizedCrop(8, scale=(0.5, 1))
