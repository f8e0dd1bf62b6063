"""What the report says of what XLA has compiled, and what padding does about it: ``make test-xla``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_xla", reason="needs torch_xla, in an environment of its own: make test-xla")

from lightning_accel import AccelXLAPlugin
from support.xla_runs import fit, rows, texts

pytestmark = pytest.mark.numbers

LENGTHS = [17, 18, 19, 21, 22, 23, 25, 26]


def test_each_length_is_a_program_and_the_report_says_so() -> None:
    plugin = AccelXLAPlugin()
    module = fit(plugin, loader=texts(LENGTHS, vocabulary=11), vocabulary=11)
    record = plugin.report.of("xla")
    assert module.seen.compiled[-1] - module.seen.compiled[0] == len(LENGTHS) - 1
    assert record.data["for_new_shapes"] == len(LENGTHS) - 2  # the first two steps compile in any case
    assert record.data["programs"] >= len(LENGTHS)
    assert f"train, (4, {LENGTHS[-1]}): 1 programs in " in record.details
    (advice,) = [note for note in plugin.report.notes if "shapes of a batch" in note]
    assert "padding=64" in advice


def test_padded_before_the_transfer_there_are_few_programs_and_the_same_losses() -> None:
    """What pads a batch on the device would itself be compiled for each length."""
    plain = fit(AccelXLAPlugin(), loader=texts(LENGTHS, vocabulary=11), vocabulary=11)
    plugin = AccelXLAPlugin(loader={"padding": 16})
    ours = fit(plugin, loader=texts(LENGTHS, vocabulary=11), vocabulary=11)
    assert plugin.report.of("padding").status.endswith("8 lengths → 1")
    assert ours.seen.compiled[-1] == ours.seen.compiled[1]
    assert ours.seen.values() == pytest.approx(plain.seen.values(), rel=1e-5)
    assert plugin.report.of("xla").data["for_new_shapes"] == 0


def test_where_only_the_number_of_samples_differs_the_loader_is_to_drop_the_last() -> None:
    from lightning_accel.lightning.xla_compilations import _mend

    assert "drop_last=True" in _mend({((4, 8), (4,)), ((3, 8), (3,))})


def test_equal_batches_are_compiled_for_once() -> None:
    plugin = AccelXLAPlugin()
    fit(plugin, loader=rows(6), validation=rows(2), max_epochs=2)
    data = plugin.report.of("xla").data
    assert data["for_new_shapes"] == 0
    assert not [note for note in plugin.report.notes if "shapes" in note]
