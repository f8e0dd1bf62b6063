"""What covers and blends images: the labels say what was done to the images, sample by sample."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy")

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from lightning_accel.data import CutMix, MixUp, Normalize, Position, Preprocess, RandomErasing, Transform
from lightning_accel.data.transform import Shape

pytestmark = pytest.mark.numbers

EVALUATION = Position(training=False)
CLASSES = 64


def applied(transform: Transform, batch: Any, position: Position | None = None, seed: int = 0) -> Any:
    return Preprocess([transform], seed=seed)(batch, position)


def one_class_each(count: int = CLASSES, height: int = 10, width: int = 12) -> tuple[Tensor, Tensor]:
    """Images of which each is filled with its class, so that the pixels of a blend tell whose they are."""
    labels = torch.randperm(count)
    return labels.float().reshape(-1, 1, 1, 1).expand(-1, 3, height, width).contiguous(), labels


# -- RandomErasing -----------------------------------------------------------------------------------------------------


def covered(result: Tensor) -> Tensor:
    """Which pixels of images of ones, ``(N, H, W)``, were covered with zeros."""
    assert ((result == 0) | (result == 1)).all()
    assert (result == result[:, :1]).all()
    return result[:, 0] == 0


def test_what_is_erased_is_one_rectangle() -> None:
    for mask in covered(applied(RandomErasing(1), torch.ones(64, 3, 20, 30))):
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        filled = mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert filled.all()
        assert mask.sum() == filled.numel()


def test_erased_areas_are_uniform_in_scale_and_their_shapes_in_ratio() -> None:
    transform = RandomErasing(1, scale=(0.05, 0.2), ratio=(0.5, 2))
    drawn = transform.draw(Shape(4000, 3, 800, 1000), np.random.default_rng(0))
    assert drawn is not None
    height, width = drawn.height, drawn.width
    assert stats.kstest(height * width / 8e5, stats.uniform(0.05, 0.15).cdf).pvalue > 1e-4
    assert stats.kstest(np.log2(height / width), stats.uniform(-1, 2).cdf).pvalue > 1e-4
    assert drawn.top.min() == 0
    assert (drawn.top + height).max() <= 800
    assert (drawn.left + width).max() <= 1000


@pytest.mark.parametrize("p", [0, 0.3, 1])
def test_about_p_of_the_images_are_erased(p: float) -> None:
    erased = covered(applied(RandomErasing(p), torch.ones(1000, 1, 8, 8))).flatten(1).any(1).sum()
    assert stats.binomtest(int(erased), 1000, p).pvalue > 1e-4


def test_erased_pixels_get_the_value_and_uint8_stays_uint8() -> None:
    images = torch.ones(16, 8, 8, 3, dtype=torch.uint8)
    erased = applied(RandomErasing(1, value=7), images)
    assert erased.dtype == torch.uint8
    assert set(erased.unique().tolist()) == {1, 7}


def test_nothing_is_erased_in_evaluation() -> None:
    images = torch.rand(4, 3, 8, 8)
    assert torch.equal(applied(RandomErasing(1), images, EVALUATION), images)


@pytest.mark.parametrize("value", ["random", None, (0.1, 0.2, 0.3), float("nan")])
def test_a_value_that_is_no_number_is_refused_at_once(value: Any) -> None:
    with pytest.raises(ValueError, match=r"RandomErasing\(value="):
        RandomErasing(value=value)


@pytest.mark.parametrize("value", [300, -1, 0.5])
def test_a_value_that_uint8_cannot_hold_is_refused_with_both(value: float) -> None:
    with pytest.raises((TypeError, ValueError), match=r"RandomErasing.*uint8"):
        applied(RandomErasing(1, value=value), torch.ones(4, 3, 8, 8, dtype=torch.uint8))


# -- MixUp and CutMix --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("transform", [MixUp(0.7, CLASSES), CutMix(0.7, CLASSES)])
def test_the_labels_say_how_much_of_which_image_each_one_is_made_of(transform: Transform, channels_last: bool) -> None:
    images, labels = one_class_each()
    batch = (images.permute(0, 2, 3, 1) if channels_last else images, labels)
    mixed, shares = applied(transform, batch)
    assert mixed.shape == batch[0].shape
    assert shares.shape == (CLASSES, CLASSES)
    assert shares.dtype == torch.float32
    torch.testing.assert_close(shares.sum(1), torch.ones(CLASSES))
    assert (shares >= 0).all()
    # As every image holds its class number, the mean pixel is the mean of class numbers.
    expected = shares @ torch.arange(CLASSES, dtype=torch.float32)
    torch.testing.assert_close(mixed.flatten(1).mean(1), expected, atol=1e-4, rtol=1e-5)
    assert ((shares > 0).sum(1) <= 2).all()


def test_mixup_gives_each_pixel_the_share_that_the_labels_have() -> None:
    images, labels = torch.rand(32, 3, 6, 6), torch.arange(32)
    mixed, shares = applied(MixUp(1.0, 32), (images, labels))
    torch.testing.assert_close(mixed, torch.einsum("nk,kchw->nchw", shares, images))


def test_cutmix_takes_whole_pixels_of_one_rectangle() -> None:
    images, labels = one_class_each()
    mixed, shares = applied(CutMix(1.0, CLASSES), (images, labels))
    for image, own, share in zip(mixed, labels, shares, strict=True):
        foreign = image[0] != own
        assert (image == image[:1]).all()
        assert len(image.unique()) <= 2
        torch.testing.assert_close(share[own], 1 - foreign.float().mean())
        if foreign.any():
            rows, columns = foreign.any(1).nonzero(), foreign.any(0).nonzero()
            assert foreign[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()


def test_cutmix_takes_uint8_and_leaves_it_uint8() -> None:
    images = torch.randint(0, 256, (8, 3, 6, 6), dtype=torch.uint8)
    assert applied(CutMix(1.0, 4), (images, torch.arange(8) % 4))[0].dtype == torch.uint8


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_mixup_s_shares_differ_from_sample_to_sample_and_follow_the_beta_distribution(alpha: float) -> None:
    drawn = MixUp(alpha, 2).draw(Shape(3000, 1, 2, 2), np.random.default_rng(0))
    assert stats.kstest(drawn.kept, stats.beta(alpha, alpha).cdf).pvalue > 1e-4
    assert sorted(drawn.partner) == list(range(3000))


def test_partners_are_drawn_anew_and_not_always_the_neighbours() -> None:
    draws = [MixUp(1.0, 2).draw(Shape(50, 1, 2, 2), np.random.default_rng(seed)).partner for seed in range(2)]
    assert not np.array_equal(*draws)
    assert all(len(set((draw - np.arange(50)) % 50)) > 10 for draw in draws)


@pytest.mark.parametrize("kind", [MixUp, CutMix])
def test_labels_that_are_probabilities_are_blended_without_a_class_count(kind: Any) -> None:
    images, labels = one_class_each()
    soft = torch.nn.functional.one_hot(labels, CLASSES)
    for dtype in (torch.float32, torch.float64):
        blended = applied(kind(0.7), {"x": images, "y": soft.to(dtype)})
        hard = applied(kind(0.7, CLASSES), (images, labels))
        assert torch.equal(blended["x"], hard[0])
        torch.testing.assert_close(blended["y"].float(), hard[1])


def test_mixup_and_cutmix_in_one_chain_blend_what_was_blended() -> None:
    images, labels = one_class_each()
    chain = Preprocess([MixUp(1.0, CLASSES), CutMix(1.0, CLASSES)], seed=0)
    mixed, shares = chain((images, labels))
    torch.testing.assert_close(mixed.mean((1, 2, 3)), shares @ torch.arange(64.0), atol=1e-4, rtol=1e-5)
    assert (shares > 0).sum(1).max() > 2


@pytest.mark.parametrize("transform", [MixUp(1.0, CLASSES), CutMix(1.0, CLASSES)])
def test_evaluation_sees_images_and_labels_as_they_are(transform: Transform) -> None:
    images, labels = one_class_each()
    result = applied(transform, (images, labels), EVALUATION)
    assert torch.equal(result[0], images)
    assert torch.equal(result[1], labels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_of_any_width_are_labels(dtype: torch.dtype) -> None:
    images, labels = one_class_each()
    expected = applied(MixUp(1.0, CLASSES), (images, labels))[1]
    assert torch.equal(applied(MixUp(1.0, CLASSES), (images, labels.to(dtype)))[1], expected)


@pytest.mark.parametrize("count", [0, 1])
def test_batches_of_one_or_no_image_are_blended_with_themselves(count: int) -> None:
    images, labels = torch.rand(count, 3, 4, 4), torch.zeros(count, dtype=torch.int64)
    for transform in (MixUp(1.0, 3), CutMix(1.0, 3)):
        mixed, shares = applied(transform, (images, labels))
        torch.testing.assert_close(mixed, images)
        torch.testing.assert_close(shares, torch.tensor([[1.0, 0.0, 0.0]] * count).reshape(count, 3))


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MixUp, CutMix])
def test_hard_labels_without_a_class_count_are_refused_with_an_example(kind: Any) -> None:
    with pytest.raises(ValueError, match=rf"how many classes: {kind.__name__}\(1.0, num_classes=10\)"):
        applied(kind(1.0), one_class_each())


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_beyond_the_classes_is_refused_with_what_was_found(label: int) -> None:
    batch = torch.rand(2, 3, 4, 4), torch.tensor([0, label])
    with pytest.raises(ValueError, match=r"MixUp\(num_classes=3\).*allowed: 0 to 2"):
        applied(MixUp(1.0, 3), batch)


def test_mixup_of_uint8_is_refused_with_the_mend() -> None:
    with pytest.raises(TypeError, match=r"MixUp: the images are uint8; it takes float16.*Put Normalize before it"):
        applied(MixUp(1.0, 3), (torch.ones(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])))


def test_probabilities_of_another_number_of_classes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"MixUp\(num_classes=3\): the labels have 4"):
        applied(MixUp(1.0, 3, label_key="y"), {"x": torch.rand(2, 3, 4, 4), "y": torch.rand(2, 4)})


@pytest.mark.parametrize("labels", [torch.rand(2), torch.zeros(2, 3, 4), torch.zeros(2, 1, 1).long()])
def test_labels_that_are_none_are_refused_with_what_is_taken(labels: Tensor) -> None:
    with pytest.raises(TypeError, match=r"MixUp: the labels are .* it takes"):
        applied(MixUp(1.0, 3, label_key="y"), {"x": torch.rand(2, 3, 4, 4), "y": labels})


@pytest.mark.parametrize("labels", [torch.zeros(3).long(), torch.zeros(1).long(), torch.rand(3, 5)])
def test_labels_for_another_number_of_images_are_refused_with_both(labels: Tensor) -> None:
    with pytest.raises(ValueError, match=r"MixUp.*(2|3|1).*(images|samples|labels)"):
        applied(MixUp(1.0, 5, label_key="y"), {"x": torch.rand(2, 3, 4, 4), "y": labels})


def test_numbers_of_samples_are_not_taken_for_their_labels_where_probabilities_stand_beside_them() -> None:
    """Without a class count only probabilities can be the label, and they are the only ones here."""
    images, labels = one_class_each()
    soft = torch.nn.functional.one_hot(labels, CLASSES).float()
    batch = applied(MixUp(1.0), {"image": images, "index": torch.arange(CLASSES) + 1000, "label": soft})
    assert batch["index"].tolist() == list(range(1000, 1000 + CLASSES))
    assert not torch.equal(batch["label"], soft)


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", 0), ("alpha", -1), ("alpha", "1"), ("alpha", float("inf")), ("num_classes", 0), ("num_classes", 2.5)],
)
def test_a_setting_that_is_none_is_refused_at_once(name: str, value: Any) -> None:
    for kind in (MixUp, CutMix):
        with pytest.raises(ValueError, match=rf"{kind.__name__}\({name}="):
            kind(**{name: value})


def test_after_normalisation_the_blend_is_one_of_normalised_images() -> None:
    images, labels = one_class_each()
    chain = Preprocess([Normalize(2.0, 4.0), MixUp(1.0, CLASSES)], seed=0)
    mixed, shares = chain((images, labels))
    torch.testing.assert_close(mixed.mean((1, 2, 3)), (shares @ torch.arange(64.0) - 2) / 4, atol=1e-4, rtol=1e-4)
