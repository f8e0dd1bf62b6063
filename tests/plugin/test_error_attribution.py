"""Which technique an error speaks of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_accel.core.report import EditError
from lightning_accel.lightning.fallbacks import suspects
from lightning_accel.techniques.memory_format import MemoryFormat


@pytest.mark.parametrize(
    ("message", "technique"),
    [
        ("mat1 and mat2 must have the same dtype, but got BFloat16 and Float", "precision"),
        ("expected scalar type Half but found Float", "precision"),
        ("view size is not compatible with input tensor's size and stride", "memory_format"),
        ("a variable needed for gradient computation has been modified by an inplace operation", "inplace_activations"),
    ],
)
def test_the_words_of_an_error_name_a_technique(message: str, technique: str) -> None:
    assert suspects(RuntimeError(message)) == [technique]


def test_an_edit_that_raises_says_whose_it_is() -> None:
    assert suspects(EditError("loss", "cannot be differentiated twice")) == ["loss"]


def test_the_code_that_an_error_came_through_names_a_technique() -> None:
    with pytest.raises(AttributeError) as raised:
        MemoryFormat.from_settings(None, None)  # without its settings
    assert suspects(raised.value) == ["memory_format"]


def test_an_error_of_the_users_own_names_none() -> None:
    with pytest.raises(RuntimeError) as raised:
        nn.Linear(2, 2)(torch.zeros(3))
    assert suspects(raised.value) == []
