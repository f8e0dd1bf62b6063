"""The figures that loggers show: what is named in them, and whom they can be read by."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lightning_accel.evidence.figures import _COLORS, pixels, share_bar

pytest.importorskip("matplotlib")

PARTS = {"waiting for data": 12.0, "forward": 20.0, "backward": 41.0, "optimizer": 7.0}


def words(figure: Any) -> str:
    texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return "\n".join([*texts, *(axes.get_title(loc="left") for axes in figure.axes)])


def test_every_part_is_named_with_its_value_and_its_share() -> None:
    shown = words(share_bar(PARTS, "ms", "What a step's time goes to"))
    for line in ("What a step's time goes to: 80 ms", "forward: 20 ms (25.0%)", "backward: 41 ms (51.2%)"):
        assert line in shown


def test_the_parts_lie_side_by_side_and_add_up_to_the_whole() -> None:
    (axes,) = share_bar(PARTS, "ms", "A step").axes
    bars = [bar.get_window_extent().transformed(axes.transData.inverted()) for bar in axes.patches]
    assert [bar.width for bar in bars] == pytest.approx(list(PARTS.values()))
    assert bars[-1].x1 == pytest.approx(axes.get_xlim()[1])


def test_it_shows_any_unit() -> None:
    assert "parameters: 512.0 MiB (50.0%)" in words(
        share_bar({"parameters": 2.0**29, "logits": 2.0**29}, "bytes", "The peak")
    )


def test_it_stands_on_white_in_a_dark_page_too() -> None:
    picture = pixels(share_bar(PARTS, "ms", "A step"))
    assert picture.ndim == 3
    assert picture.shape[2] == 3  # nothing shines through
    assert (picture[[0, 0, -1, -1], [0, -1, 0, -1]] == 255).all()


def test_neighbours_differ_in_lightness_and_not_in_colour_alone() -> None:
    def lightness(color: str) -> float:
        red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    for first, second in itertools.pairwise(_COLORS):
        darker, lighter = sorted((lightness(first), lightness(second)))
        assert (lighter + 0.05) / (darker + 0.05) > 1.15


def test_more_parts_than_colours_are_told_apart_by_a_pattern() -> None:
    (axes,) = share_bar({f"part {i}": 1.0 for i in range(10)}, "bytes", "The peak").axes
    looks = [(bar.get_facecolor(), bar.get_hatch()) for bar in axes.patches]
    assert len(set(looks)) == 10


@pytest.mark.parametrize("values", [{}, {"forward": 0.0}, {"forward": 2.0, "backward": -1.0}])
def test_what_is_no_whole_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="sizes above zero"):
        share_bar(values, "ms", "A step")
