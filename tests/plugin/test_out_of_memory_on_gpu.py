"""A training step that runs out of a GPU's memory, of which torch's allocator gives this process only a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin
from lightning_accel.core.report import AccelWarning
from support.gpu_sizes import on_gpu
from support.plugin.memory_runs import Batches, Deep, Flat

pytestmark = [pytest.mark.gpu, pytest.mark.numbers]

PART = on_gpu(1, simulated=16)
SMALL, LARGE = 1024 // PART, (1 << 17) // PART  # samples; a block keeps some 3 KiB for each
GIB = (1 << 30) // PART


@pytest.fixture
def with_room_for() -> Iterator[Callable[[int], None]]:
    """Lets this process have so many bytes of the GPU, beside what it has."""

    def limit(more_bytes: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more_bytes) / total, 0)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    torch.cuda.empty_cache()


def trained(kind: type[Any], sizes: list[int], plugin: AccelPlugin | None) -> Any:
    seed_everything(0)
    model = kind()
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        plugins=[plugin] if plugin else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Batches(sizes), batch_size=None))
    return model


def test_the_step_runs_again_with_what_needs_less_and_gives_a_roomy_runs_numbers(
    with_room_for: Callable[[int], None],
) -> None:
    sizes = [SMALL] * 4 + [LARGE] + [SMALL] * 2
    plain = trained(Deep, sizes, None)
    plugin = AccelPlugin(precision="32-true", report=False)
    with_room_for(3 * GIB)
    with pytest.warns(AccelWarning, match=r"out of memory: .* put on at step 4"):
        model = trained(Deep, sizes, plugin)
    assert plugin.state_dict()["out_of_memory"]
    torch.testing.assert_close(model.losses[-1], plain.losses[-1], rtol=1e-5, atol=1e-6)
    assert float(model.seen) == float(plain.seen) == len(sizes)


def test_the_page_is_torchs_own_kind_of_error_and_lists_the_allocators_books(
    with_room_for: Callable[[int], None],
) -> None:
    with_room_for(GIB)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as raised:
        trained(Flat, [SMALL, LARGE * 4], AccelPlugin(precision="32-true", report=False))
    page = str(raised.value)
    assert "  inner.wide" in page
    assert "activations, and what was being computed" in page
    assert "on cuda:0:" in page
    assert "DataLoader(batch_size=" in page
