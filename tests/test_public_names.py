"""What ``lightning_accel`` promises by name is there."""

from __future__ import annotations

import pytest

import lightning_accel


@pytest.mark.parametrize("name", lightning_accel.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(lightning_accel, name).__name__ == name


def test_a_name_that_is_not_there_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AccelPlugn'"):
        _ = lightning_accel.AccelPlugn
