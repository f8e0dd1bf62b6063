"""Batches that are objects of the user's own, and parts that no array can be made of."""

from __future__ import annotations

from typing import Any

import torch

from lightning_accel.data import GaussianNoise, Map, Normalize, Preprocess, RandomHorizontalFlip


class Graph:
    """As those of PyTorch Geometric: it keeps its attributes in a store, and can be moved."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__["store"] = parts

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["store"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["store"] = {**self.__dict__["store"], name: value}

    def to(self, device: Any) -> Graph:
        return self


def test_a_part_of_an_object_becomes_a_tensor_again() -> None:
    graph = Graph(x=torch.zeros(4, 3))
    noisy = Preprocess([GaussianNoise(0.1, key="x")])(graph)
    assert isinstance(noisy.x, torch.Tensor)
    assert noisy.x.abs().sum() > 0
    assert graph.x.abs().sum() == 0


def test_an_object_keeps_its_parts_where_it_wants_them() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    graph = Preprocess([RandomHorizontalFlip(key="image"), Normalize(0.5, 0.5, key="image")])(Graph(image=images))
    assert graph.__dict__["store"]["image"].dtype == torch.float32


def test_parts_that_no_array_can_be_made_of_stay_what_they_are() -> None:
    batch = {"x": torch.ones(2), "sparse": torch.eye(2).to_sparse(), "eighth": torch.ones(2).to(torch.float8_e4m3fn)}
    doubled = Preprocess([Map(lambda xp, parts: {**parts, "x": parts["x"] * 2})])(batch)
    assert doubled["x"].tolist() == [2, 2]
    assert doubled["sparse"] is batch["sparse"]
    assert doubled["eighth"] is batch["eighth"]
