"""What moves when activations are offloaded, how often, and when it comes back; and that others are left alone."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accel.memory.saved_tensors import saving
from support.memory.offloaders import NO_MODEL, Make, make, one_core, packed_away, wave
from support.models import TASKS

pytestmark = pytest.mark.numbers

__all__ = ["make", "one_core"]

# -- what moves, and how often -------------------------------------------------------------------------------------


def test_a_tensor_saved_twice_moves_once(make: Make) -> None:
    offloader = make()
    x = torch.randn(1000, requires_grad=True)
    with saving(offloader, NO_MODEL):
        h = x * 2
        y = h.sin() + h.cos() + h.view(10, 100).t().exp().sin().sum()
    assert (offloader.stats.tensors_out, offloader.stats.bytes_out) == (2, 2 * 4000)  # h, and what exp() gives
    y.sum().backward()


def test_parts_of_one_storage_move_once(make: Make) -> None:
    """Queries, keys and values are thirds of what one layer gives."""
    offloader = make()
    x = torch.randn(4, 300, requires_grad=True)
    with saving(offloader, NO_MODEL):
        queries, keys, values = (x * 1).chunk(3, dim=-1)
        (queries.sin() * keys.sin() * values.sin()).sum()
    at_first = offloader.stats.tensors_out
    assert at_first - 3 - 1 == 1  # three sines, one product, and the storage of all three


def test_little_of_a_storage_moves_alone(make: Make) -> None:
    offloader = make()
    x = torch.randn(100_000, requires_grad=True)
    with saving(offloader, NO_MODEL):
        (x * 2)[300:400].sin()
    assert 400 <= offloader.stats.bytes_out < 400 + 512


def test_each_version_of_a_tensor_moves_for_itself(make: Make) -> None:
    """Those of the earlier ones can no longer be asked for: that is the usual error about in-place changes."""
    offloader = make()
    tensor = torch.zeros(1000)
    packed = []
    for _ in range(3):
        tensor += 1
        packed += [offloader.pack(tensor), offloader.pack(tensor)]
    assert offloader.stats.tensors_out == 3
    del tensor
    packed_away(offloader, lambda: torch.zeros(10))
    assert [int(p.unpack()[0]) for p in packed[-2:] if p] == [3, 3]


STAYS: dict[str, Callable[[], Tensor]] = {
    "smaller than min_bytes": lambda: torch.zeros(24),
    "a small part of what is large": lambda: torch.zeros(1000)[:24],
    "empty": lambda: torch.zeros(0, 100),
    "conjugate": lambda: torch.zeros(100, dtype=torch.complex64).conj(),
    "negative": lambda: torch.zeros(100, dtype=torch.complex64).conj().imag,
    "on another device": lambda: torch.zeros(100, device="meta"),
}


@pytest.mark.parametrize("tensor_of", STAYS.values(), ids=STAYS)
def test_what_stays(tensor_of: Callable[[], Tensor], make: Make) -> None:
    assert make(min_bytes=100).pack(tensor_of()) is None


class Owner(nn.Module):
    """Has backward passes need its parameter, its buffer, views of them, and a copy that autocast makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 20))
        self.register_buffer("scale", torch.randn(20))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight.t()
        x = x * self.scale * self.scale.view(1, 20)[:, :20]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.linear(x, self.weight).float()


def test_parameters_buffers_and_their_views_and_copies_never_move(make: Make) -> None:
    model, offloader = Owner(), make()
    x = torch.randn(7, 20, requires_grad=True)
    with saving(offloader, model):
        model(x)
    # The input, and the input of the layer under autocast, in bfloat16.
    assert (offloader.stats.tensors_out, offloader.stats.bytes_out) == (2, 7 * 20 * 4 + 7 * 20 * 2)


def test_at_most_a_few_activations_are_left_on_the_device_after_the_forward_pass(make: Make) -> None:
    offloader = make()
    x = torch.randn(10_000, requires_grad=True)
    storages = []
    with saving(offloader, NO_MODEL):
        h = x
        for _ in range(20):
            h = h.sin()
            storages.append(weakref.ref(h.untyped_storage()))
        y = h.sum()
        del h
    assert sum(storage() is not None for storage in storages) <= offloader.prefetch_depth
    y.backward()


def test_other_threads_are_left_alone(make: Make) -> None:
    offloader = make()
    found = []

    def other() -> None:
        x = torch.randn(1000, requires_grad=True)
        wave(x).sum().backward()
        found.append(x.grad)

    with saving(offloader, NO_MODEL):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(found) == 1
    assert offloader.stats.tensors_out == 0


# -- and back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_those_saved_before_one_are_under_way_when_it_is_used(depth: int, make: Make) -> None:
    offloader = make()
    offloader.prefetch_depth = depth
    packed = [packed_away(offloader, lambda: torch.ones(1000)) for _ in range(8)]
    packed[7].unpack()
    assert offloader.stats.bytes_in == (1 + depth) * 4000
    packed[6].unpack()
    assert offloader.stats.bytes_in == (2 + depth) * 4000


def test_what_is_back_stays_until_its_last_use(make: Make) -> None:
    offloader = make()
    h = torch.ones(1000)
    twins = [offloader.pack(h), offloader.pack(h)]
    del h
    packed_away(offloader, lambda: torch.ones(10))
    stored = []
    for packed in twins:
        assert packed is not None
        stored.append(packed.unpack().untyped_storage()._cdata)
        assert offloader.stats.bytes_in == 4000
    assert stored[0] == stored[1]
    assert twins[0] is not None
    twins[0].unpack()
    assert offloader.stats.bytes_in == 8000


def test_a_twin_that_dies_unused_does_not_keep_the_copy_on_the_device(make: Make) -> None:
    offloader = make()
    h = torch.ones(1000)
    used, unused = offloader.pack(h), offloader.pack(h)
    del h
    packed_away(offloader, lambda: torch.ones(10))
    assert used is not None
    on_device = weakref.ref(used.unpack().untyped_storage())
    assert on_device() is not None
    del unused
    offloader.pack(torch.ones(10))
    assert on_device() is None


def test_a_tensor_that_is_still_on_the_device_is_not_brought_back(make: Make) -> None:
    offloader = make()
    kept = torch.ones(1000)
    packed = offloader.pack(kept)
    packed_away(offloader, lambda: torch.ones(10))
    assert packed is not None
    assert packed.unpack().data_ptr() == kept.data_ptr()
    assert offloader.stats.bytes_in == 0


# -- with others ---------------------------------------------------------------------------------------------------


def test_what_enters_a_checkpoint_is_offloaded_and_what_is_recomputed_is_not(make: Make) -> None:
    offloader = make()
    x = torch.randn(1000, requires_grad=True)
    with saving(offloader, NO_MODEL):
        h = x * 2
        for _ in range(4):
            h = checkpoint(wave, h, use_reentrant=False)
    assert offloader.stats.tensors_out == 4
    h.sum().backward()
    assert offloader.stats.tensors_out == 4
    plain = x.detach().clone().requires_grad_()
    wave(plain * 2, 32).sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_around_single_blocks_it_takes_what_these_save(make: Make) -> None:
    """As a planner has it, and entered again before the last one was left."""
    offloader = make()
    x = torch.randn(1000, requires_grad=True)
    with saving(offloader, NO_MODEL):
        h = wave(x * 2, 2)
    h = wave(h, 3)
    with saving(offloader, NO_MODEL):
        h = wave(h, 1)
        with saving(offloader, NO_MODEL):
            h = wave(h, 1)
    assert offloader.stats.tensors_out == 4
    h.sum().backward()
    plain = x.detach().clone().requires_grad_()
    wave(plain * 2, 7).sum().backward()
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_compiled_block_saves_what_it_saves_through_it(make: Make) -> None:
    model, task, offloader = TASKS["cnn"].model(), TASKS["cnn"], make()
    plain = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    try:
        for step in range(2):
            inputs, targets = task.batch(step)
            with saving(offloader, model):
                loss = task.loss(model(inputs), targets)
            assert offloader.stats.tensors_out > 10
            loss.backward()
            task.loss(plain(inputs), targets).backward()
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_copy_of_the_model_in_mid_run_is_a_plain_one(make: Make) -> None:
    task, offloader = TASKS["transformer"], make()
    model = task.model()
    inputs, targets = task.batch()
    with saving(offloader, model):
        loss = task.loss(model(inputs), targets)
        twin = copy.deepcopy(model)
    before = offloader.stats.tensors_out
    task.loss(twin(inputs), targets).backward()
    assert offloader.stats.tensors_out == before
    loss.backward()
