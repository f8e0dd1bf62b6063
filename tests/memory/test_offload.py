"""Offloaded tensors come back as they were, move once, and leave nothing behind however a step ends."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accel.memory.buffers import OffloadingError
from lightning_accel.memory.offload import Offloader
from lightning_accel.memory.saved import Packed, saving
from models import TASKS, Task

resource = pytest.importorskip("resource")

CPU = torch.device("cpu")
PLACES = ["host", "disk"]
NO_MODEL = nn.Module()
MIB = 1 << 20

Make = Callable[..., Offloader]


@pytest.fixture(autouse=True)
def _one_core() -> Iterator[None]:
    """With the thread that copies there are otherwise more than there are cores, and operators wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes offloaders that take every tensor, and closes them; then no thread, mapping or file may be left."""
    folder = tmp_path / "spill"
    folder.mkdir()
    made: list[Offloader] = []
    before = psutil.Process().num_fds()

    def make(to: str = "host", **options: Any) -> Offloader:
        settings: dict[str, Any] = {"device": CPU, "min_bytes": 1, "folder": str(folder), **options}
        made.append(Offloader(settings.pop("device"), to, **settings))  # type: ignore[arg-type]
        return made[-1]

    gc.freeze()  # to look for garbage among what the test makes, not among all that the suite has imported
    yield make
    for offloader in made:
        offloader.close()
    made.clear()
    gc.collect()
    gc.unfreeze()
    assert not copying_threads()
    assert list(folder.iterdir()) == []
    assert psutil.Process().num_fds() <= before


def copying_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lightning-accel-offload"]


def wave(x: Tensor, layers: int = 8) -> Tensor:
    """Every layer saves its input, which nothing else keeps."""
    for _ in range(layers):
        x = x.sin()
    return x


def packed_away(offloader: Offloader, tensor_of: Callable[[], Tensor]) -> Packed:
    """A tensor that is on the device no more."""
    tensor = tensor_of()
    storage = weakref.ref(tensor.untyped_storage())
    packed = offloader.pack(tensor)
    assert packed is not None
    del tensor
    while storage() is not None:  # others push it out
        assert offloader.pack(torch.zeros(1000)) is not None
    return packed


# -- same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_training_ends_with_the_very_same_weights(task: Task, to: str, make: Make) -> None:
    def trained(offloader: Offloader | None) -> dict[str, Tensor]:
        model = task.model()
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(3)
        for step in range(4):
            inputs, targets = task.batch(step)
            with saving(offloader, model) if offloader else nullcontext():
                loss = task.loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return model.state_dict()

    offloader = make(to)
    torch.testing.assert_close(trained(offloader), trained(None), rtol=0, atol=0)
    assert offloader.stats.bytes_in > 0


TENSORS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.randn(30, 40),
    "bfloat16 with NaN": lambda: torch.randn(30, 40).log().bfloat16(),
    "float16": lambda: torch.randn(30, 40).half(),
    "float64": lambda: torch.randn(30, 40, dtype=torch.float64),
    "complex64": lambda: torch.randn(30, 40, dtype=torch.complex64),
    "bool": lambda: torch.randn(30, 40) > 0,
    "int64": lambda: torch.randint(-9, 9, (30, 40)),
    "float8": lambda: torch.randn(30, 40).to(torch.float8_e4m3fn),
    "a scalar": lambda: torch.tensor(3.5),
    "transposed": lambda: torch.randn(30, 40).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(30, 40)[::2, 1:30:3],
    "expanded": lambda: torch.randn(30, 1).expand(30, 40),
    "most of a storage": lambda: torch.randn(30, 40)[5:],
    "little of a storage": lambda: torch.randn(300, 40)[17:23],
    "the end of a storage": lambda: torch.randn(30_001)[-1:],
    "little of it, with gaps, in another order": lambda: torch.randn(300, 4, 10)[101:107, ::2].permute(2, 0, 1),
    "queries of an attention": lambda: torch.randn(4, 6, 48).chunk(3, dim=-1)[1].unflatten(-1, (2, 8)).transpose(1, 2),
}


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("tensor_of", TENSORS.values(), ids=TENSORS)
def test_every_tensor_comes_back_to_the_bit(tensor_of: Callable[[], Tensor], to: str, make: Make) -> None:
    torch.manual_seed(0)
    expected = tensor_of()
    torch.manual_seed(0)
    offloader = make(to)
    packed = packed_away(offloader, tensor_of)
    for _ in range(2):
        found = packed.unpack()
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
        raw = [t.contiguous().view(torch.uint8 if t.dim() else t.dtype) for t in (found, expected)]
        assert torch.equal(*raw)
    assert offloader.stats.bytes_in > 0


def test_what_the_forward_pass_goes_on_using_is_untouched(make: Make) -> None:
    x = torch.randn(1000, requires_grad=True)
    with saving(make(), NO_MODEL):
        h = x * 2
        first = wave(h)
        assert torch.equal(h, x * 2)
        (first * h).sum().backward()
    plain = x.detach().clone().requires_grad_()
    (wave(plain * 2) * (plain * 2)).sum().backward()
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("depth", [1, 8])
def test_branches_may_be_walked_in_the_order_in_which_they_were_built(depth: int, make: Make) -> None:
    offloader = make()
    offloader.prefetch_depth = depth
    x = torch.randn(1000, requires_grad=True)
    with saving(offloader, NO_MODEL):
        branches = [wave(x * k) for k in range(1, 4)]
    found = [torch.autograd.grad(branch.sum(), x)[0] for branch in branches]
    expected = [torch.autograd.grad(wave(x * k).sum(), x)[0] for k in range(1, 4)]
    assert all(map(torch.equal, found, expected))
    assert offloader.stats.live_bytes == 0


@pytest.mark.parametrize("to", PLACES)
def test_a_graph_that_is_kept_can_be_walked_again(to: str, make: Make) -> None:
    x = torch.randn(1000, requires_grad=True)
    offloader = make(to)
    with saving(offloader, NO_MODEL):
        y = wave(x).sum()
    found = [torch.autograd.grad(y, x, retain_graph=again < 2)[0] for again in range(3)]
    assert torch.equal(found[0], torch.autograd.grad(wave(x).sum(), x)[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert offloader.stats.live_bytes == 0


def test_second_derivatives_pass_through(make: Make) -> None:
    def twice(x: Tensor, offloader: Offloader | None) -> Tensor:
        with saving(offloader, NO_MODEL) if offloader else nullcontext():
            y = wave(x, 3).sum()
        with saving(offloader, NO_MODEL) if offloader else nullcontext():
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    x = torch.randn(1000, requires_grad=True)
    assert torch.equal(twice(x, make()), twice(x, None))


def test_an_activation_that_was_overwritten_is_an_error_as_ever(make: Make) -> None:
    x = torch.randn(1000, requires_grad=True)
    with saving(make(), NO_MODEL):
        h = x * 2
        y = h.sin()
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


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


# -- however it ends -----------------------------------------------------------------------------------------------


class Exploding(torch.autograd.Function):
    """Raises in the pass that it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, when: str) -> Tensor:
        if when == "forward":
            raise ArithmeticError("in the middle")
        ctx.when = when
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.when == "backward":
            raise ArithmeticError("in the middle")
        return gradient, None


def step_with(offloader: Offloader, when: str) -> Tensor:
    x = torch.arange(1000.0, requires_grad=True)
    with saving(offloader, NO_MODEL):
        y = wave(Exploding.apply(wave(x), when)).sum()
    if when != "never":
        y.backward()
    return x


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("when", ["forward", "backward", "never"])
def test_a_step_that_does_not_come_to_its_end_leaves_nothing(when: str, to: str, make: Make) -> None:
    offloader = make(to)
    with nullcontext() if when == "never" else pytest.raises(ArithmeticError):
        step_with(offloader, when)
    gc.collect()
    assert offloader.stats.live_bytes == 0
    x = step_with(offloader, "not at all")
    plain = x.detach().clone().requires_grad_()
    wave(wave(plain)).sum().backward()
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("to", PLACES)
def test_nothing_grows_in_two_hundred_steps(to: str, make: Make) -> None:
    offloader, task = make(to), TASKS["transformer"]
    model, process = task.model(), psutil.Process()

    def steps(count: int) -> tuple[int, int, int, int]:
        for step in range(count):
            inputs, targets = task.batch(step % 3)
            with saving(offloader, model):
                loss = task.loss(model(inputs), targets)
            loss.backward()
        del loss
        stats = offloader.stats
        known = len(offloader._known) + len(offloader._order) + len(offloader._live)
        return stats.live_bytes, stats.total_bytes, known, process.num_fds() + process.num_threads()

    before = steps(5)
    resident = process.memory_info().rss
    assert steps(200) == before
    assert before[0] == 0
    assert before[2] < 20  # what is known dies with its storage: no more than the batch and what is just on its way
    assert process.memory_info().rss - resident < 30 * MIB


def test_closing_twice_is_closing_once(make: Make) -> None:
    offloader = make("disk")
    offloader.pack(torch.ones(1000))
    assert copying_threads()
    offloader.close()
    offloader.close()
    assert not copying_threads()
    assert offloader.stats.total_bytes == 0
    assert offloader.pack(torch.ones(1000)) is None  # a copy of the model, say, that outlives the run


@pytest.mark.parametrize("to", PLACES)
def test_a_backward_pass_after_closing_says_what_is_missing(to: str, make: Make) -> None:
    offloader = make(to)
    x = torch.randn(1000, requires_grad=True)
    with saving(offloader, NO_MODEL):
        y = wave(x).sum()
    offloader.close()
    with pytest.raises(OffloadingError, match=r"offloaded, and are gone.*before undo\(\)"):
        y.backward()


def test_nothing_is_made_before_it_is_needed(make: Make) -> None:
    offloader = make("disk", min_bytes=1 << 20)
    x = torch.randn(1000, requires_grad=True)
    with saving(offloader, NO_MODEL):
        wave(x).sum().backward()
    assert not copying_threads()
    assert offloader.stats.total_bytes == 0


def test_a_forgotten_offloader_takes_its_thread_with_it(tmp_path: Path) -> None:
    offloader = Offloader(CPU, "disk", min_bytes=1, folder=str(tmp_path))
    offloader.pack(torch.ones(1000))
    threads = copying_threads()
    del offloader
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
    assert not copying_threads()


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_a_full_disk_ends_the_step_and_the_next_one_starts_anew(make: Make, tmp_path: Path) -> None:
    offloader, task = make("disk"), TASKS["transformer"]
    model = task.model().eval()
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = task.batch()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with saving(offloader, model):
            loss = task.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step(model, optimizer)
    offloader.close()
    offloader = make("disk")
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.Adam(twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    with limited(resource.RLIMIT_FSIZE, 64 << 10), pytest.raises(OffloadingError, match="'disk' needs") as raised:
        step(model, optimizer)
    # Everything is released at once, though the exception still holds the graph of that step.
    assert offloader.stats.live_bytes == offloader.stats.total_bytes == 0
    assert not copying_threads()
    assert raised.value is not None
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)

    step(model, optimizer)
    step(twin, twin_optimizer)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="needs a limit on memory")
def test_where_host_memory_runs_out_tensors_stay_on_the_device(make: Make) -> None:
    offloader = make()
    large = torch.ones(16 * MIB)
    assert offloader.pack(torch.ones(1000)) is not None
    with limited(resource.RLIMIT_AS, psutil.Process().memory_info().vms + 16 * MIB):
        assert offloader.pack(large) is None
    assert offloader.pack(large) is None  # it is not asked for again at every tensor
    assert len(offloader.complaints) == 1
    assert "stay on the device" in offloader.complaints[0]


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("depth", [1, 4])
def test_a_gpu_computes_the_very_same_gradients(to: str, depth: int, gpu: torch.device, make: Make) -> None:
    offloader = make(to, device=gpu)
    offloader.prefetch_depth = depth
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(12))).to(gpu)
    x = torch.randn(4096, 1024, device=gpu)
    expected = torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
    for _ in range(5):
        with saving(offloader, model):
            loss = model(x).square().mean()
        found = torch.autograd.grad(loss, [*model.parameters()])
        assert all(map(torch.equal, found, expected))
    assert offloader.stats.live_bytes == 0


@pytest.mark.gpu
def test_a_gpu_is_never_waited_for(gpu: torch.device, make: Make) -> None:
    offloader = make(device=gpu)
    x = torch.randn(1 << 20, device=gpu, requires_grad=True)
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # buffers are pinned in the first one
        try:
            with saving(offloader, NO_MODEL):
                y = wave(x).sum()
            y.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_peak_of_a_gpu_is_that_of_a_few_tensors(gpu: torch.device, make: Make) -> None:
    def peak(offloader: Offloader | None) -> int:
        x = torch.randn(16 << 20, device=gpu, requires_grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        with saving(offloader, NO_MODEL) if offloader else nullcontext():
            y = wave(x, 30).sum()
        y.backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start

    offloader = make(device=gpu)
    offloader.prefetch_depth = 1
    assert peak(offloader) < 0.35 * peak(None)


@pytest.mark.gpu
def test_while_a_cuda_graph_is_recorded_nothing_moves_and_that_is_said_once(gpu: torch.device, make: Make) -> None:
    offloader = make(device=gpu)
    x = torch.randn(1 << 20, device=gpu, requires_grad=True)

    def step() -> Tensor:
        with saving(offloader, NO_MODEL):
            y = wave(x).sum()
        return torch.autograd.grad(y, x)[0]

    expected = step()
    torch.cuda.synchronize()
    moved, graph = offloader.stats.tensors_out, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert torch.equal(found, expected)
    assert offloader.stats.tensors_out == moved
    assert len(offloader.complaints) == 1
    assert "CUDA graph" in offloader.complaints[0]


@pytest.mark.gpu
def test_tensors_of_another_stream_are_safe(gpu: torch.device, make: Make) -> None:
    offloader = make(device=gpu)
    x = torch.randn(8 << 20, device=gpu, requires_grad=True)
    expected = torch.autograd.grad(wave(x, 20).sum(), x)[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            with saving(offloader, NO_MODEL):
                y = wave(x, 20).sum()
            assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_tensors_of_the_host_stay_where_a_gpu_is_offloaded(gpu: torch.device, make: Make) -> None:
    assert make(device=gpu).pack(torch.ones(1000)) is None


# -- pieces of one storage -------------------------------------------------------------------------------------------


def test_pieces_that_count_their_changes_apart_are_told_apart(make: Make) -> None:
    """Both are saved at version 2, the second one after it was changed: as recurrent layers on a CPU do it."""
    x, weight = torch.randn(3, 3000, requires_grad=True), torch.randn(3, 1000)

    def loss() -> Tensor:
        a, b, _ = (x * 1.0).unsafe_chunk(3, 1)
        a = a.add_(weight).sigmoid_()
        total = (a * weight).sum()
        b = b.add_(weight).sigmoid_()
        return (a * b).sum() + total

    (expected,) = torch.autograd.grad(loss(), x)
    offloader = make("host")
    with saving(offloader, nn.Identity()):
        found = loss()
        offloader.drain()
    assert torch.equal(torch.autograd.grad(found, x)[0], expected)


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_get_the_very_same_gradients(kind: type[nn.Module], to: str, make: Make) -> None:
    torch.manual_seed(0)
    layer, x = kind(16, 32, batch_first=True), torch.randn(8, 12, 16, requires_grad=True)
    wanted = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x)[0].square().sum(), wanted)
    offloader = make(to)
    for _ in range(3):
        with saving(offloader, layer):
            loss = layer(x)[0].square().sum()
        for found, want in zip(torch.autograd.grad(loss, wanted), expected, strict=True):
            assert torch.equal(found, want)


def test_a_zero_without_memory_stays(make: Make) -> None:
    zero, weight = torch._efficientzerotensor((64, 64)), torch.randn(64, 64, requires_grad=True)
    with saving(make("host"), nn.Identity()):
        loss = (weight * zero).sum() + weight.sum()
    assert torch.equal(torch.autograd.grad(loss, weight)[0], torch.ones(64, 64))
