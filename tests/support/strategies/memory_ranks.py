"""A decoder trains on one, two and four CPU processes; each writes the memory that it needs to ``<case>.<rank>.json``.

DecoderRun by a test in a process of its own: python memory_ranks.py FOLDER [CASE ...]

Cases that take as many processes run one after another in the same forks: what DTensor learns of an operator, it has to
learn once. What is read is storages, each once:
parameters, gradients and optimizer states as they are between two steps, and the most that is alive beside them in each
part of a step.
"""

from __future__ import annotations

import functools
import json
import sys
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_accel.memory.by_strategy import (
    Attention,
    Batch,
    Checkpointing,
    Decoder,
    DecoderRun,
    DeviceMemory,
    Optimizer,
    Precision,
    Strategy,
    memory_per_device,
)
from lightning_accel.memory.recompute import recomputed
from lightning_accel.strategies import sharding
from lightning_accel.strategies.sharding import shard
from support.strategies.forks import in_ranks

LAYERS, WIDTH, HEADS = 4, 128, 4


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        strategy: How it is spread.
        processes: Over how many.
        vocab: Words of the embedding and the output layer.
        tied: Whether these have one weight.
        seq_len: Tokens in each of two sequences.
        precision: Of the computation.
        checkpointing: What blocks keep.
        attention: By a fused kernel, or by hand.
        optimizer: Of the parameters.
        is_slow: Whether it is left to `make test-slow`.
    """

    strategy: Strategy
    processes: int
    vocab: int = 512
    tied: bool = False
    seq_len: int = 32
    precision: Precision = "32-true"
    checkpointing: Checkpointing = "off"
    attention: Attention = "fused"
    optimizer: Optimizer = "adamw"
    is_slow: bool = False

    @property
    def name(self) -> str:
        """With what it has of its own."""
        own = [f"{f.name} {getattr(self, f.name)}" for f in fields(self)[2:-1] if getattr(self, f.name) != f.default]
        return ", ".join([f"{self.strategy} on {self.processes}", *own])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one process held between two steps, and the most that it had in a step.

    Attributes:
        parameters_bytes: Of its parameters.
        gradients_bytes: Of their gradients.
        optimizer_bytes: Of the optimizer's states.
        peak_bytes: The most, all of these included.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    peak_bytes: int

    @property
    def held_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


CASES = {
    case.name: case
    for case in (
        Case("accel", 1),
        Case("accel", 1, precision="bf16-mixed", optimizer="sgd-momentum", is_slow=True),
        Case("accel", 1, seq_len=512, precision="bf16-mixed", is_slow=True),
        Case("accel", 1, seq_len=512, checkpointing="selective", is_slow=True),
        Case("accel", 1, seq_len=128, checkpointing="full", optimizer="sgd-momentum"),
        Case("accel", 1, seq_len=512, attention="plain", is_slow=True),
        Case("accel_ddp", 2),
        Case("accel_ddp", 4, seq_len=512, precision="bf16-mixed", is_slow=True),
        Case("accel_fsdp", 2),
        Case("accel_fsdp", 4, is_slow=True),
        Case("accel_fsdp", 2, vocab=509, tied=True),
        Case("accel_fsdp", 4, vocab=509, tied=True, is_slow=True),
        Case("accel_fsdp", 4, vocab=8192, is_slow=True),
        Case("accel_fsdp", 2, precision="bf16-mixed", is_slow=True),
        Case("accel_fsdp", 2, vocab=8192, precision="bf16-mixed"),
        Case("accel_fsdp", 2, vocab=8192, tied=True, is_slow=True),
        Case("accel_fsdp", 4, vocab=8192, precision="bf16-mixed", is_slow=True),
        Case("accel_fsdp", 4, vocab=64, seq_len=512, is_slow=True),
        Case("accel_fsdp", 4, vocab=8192, seq_len=128, precision="bf16-mixed", is_slow=True),
        Case("accel_fsdp", 2, seq_len=512, checkpointing="full"),
        Case("accel_fsdp", 4, seq_len=512, checkpointing="full", is_slow=True),
        Case("accel_fsdp", 4, vocab=64, seq_len=512, precision="bf16-mixed", checkpointing="selective", is_slow=True),
    )
}


def expected(case: Case) -> DeviceMemory:
    """What the formula says of it."""
    decoder = Decoder(
        params=sum(p.numel() for p in Net(case).parameters()),
        layers=LAYERS,
        width=WIDTH,
        vocab=case.vocab,
        tied_embeddings=case.tied,
    )
    batch = Batch(seq_len=case.seq_len, batch_size=2, heads=HEADS, attention=case.attention)
    run = DecoderRun(
        decoder=decoder,
        batch=batch,
        precision=case.precision,
        optimizer=case.optimizer,
        checkpointing=case.checkpointing,
    )
    return memory_per_device(case.strategy, run, case.processes)


def spread(case: Case, net: Net) -> nn.Module:
    """``net`` as the strategy has it: the lines to change when something else is to be measured."""
    if case.strategy == "accel_ddp":
        return DistributedDataParallel(net, gradient_as_bucket_view=True)
    if case.strategy == "accel_fsdp":
        dtype = torch.bfloat16 if case.precision == "bf16-mixed" else None
        with mock.patch.object(sharding, "_LOW_ON_CPU", (*sharding._LOW_ON_CPU, Norm)):
            shard(net, init_device_mesh("cpu", (case.processes,)), torch.device("cpu"), dtype=dtype)
    return net


def measure(case: Case) -> Measured:
    """Trains for two steps of two batches each, and meters the second.

    Two batches, so that there are gradients during the whole step, as the formula has it.
    """
    torch.manual_seed(0)
    with StorageWatch() as watch:
        net = Net(case)
        model = spread(case, net)
        # As on a GPU, where "foreach" is the default.
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
        if case.optimizer == "sgd-momentum":
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, foreach=True)
        words = torch.randint(case.vocab, (2, case.seq_len))
        for _ in range(2):
            optimizer.zero_grad()
            watch.peak_bytes = 0
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16-mixed"):
                    loss = F.cross_entropy(model(words).flatten(0, 1), words.flatten())
                loss.backward()
            optimizer.step()

    # Adam counts its steps in a tensor of one number for each parameter: not what a formula is for.
    states = [state for states in optimizer.state.values() for state in states.values() if state.dim()]
    return Measured(
        parameters_bytes=bytes_of(net.parameters()),
        gradients_bytes=bytes_of(p.grad for p in net.parameters()),
        optimizer_bytes=bytes_of(states),
        peak_bytes=watch.peak_bytes,
    )


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    return sum(storage.nbytes() for storage in storages(tensors))


def storages(tensors: Iterable[Tensor | None]) -> list[torch.UntypedStorage]:
    """The storages of this process's own shares, each once."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None)
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in local}.values())


class StorageWatch(TorchDispatchMode):
    """Adds up the storages that are alive after every operator, of those that were made since it began.

    The allocator's events, which a profiler records, do not serve: Gloo frees buffers in threads of its own, where no
    profiler sees it. What Gloo allocates for itself, a copy of what it reduces, is left out: NCCL needs none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Views and results in place are of storages that are known, or of Gloo's.
        if all(returned.alias_info is None for returned in func._schema.returns):
            for storage in storages(t for t in tree_leaves(result) if isinstance(t, Tensor)):
                self._alive[storage._cdata] = weakref.ref(storage)
        if (alive_bytes := self._alive_bytes()) > self.peak_bytes:
            time.sleep(0.002)  # Gloo's threads let go of their tensors a little after an operation is done
            self.peak_bytes = max(self.peak_bytes, min(alive_bytes, self._alive_bytes()))
        return result

    def _alive_bytes(self) -> int:
        # FSDP resizes storages, so that each has to be asked again.
        alive_bytes = 0
        for key, reference in list(self._alive.items()):
            storage = reference()
            if storage is None:
                del self._alive[key]
            else:
                alive_bytes += storage.nbytes()
        return alive_bytes


class Net(nn.Module):
    """A decoder without biases outside its blocks, so that the root is embedding, output layer and one norm."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocab, WIDTH)
        self.blocks = nn.ModuleList(Block(case.attention) for _ in range(LAYERS))
        self.norm = Norm(WIDTH)
        self.output = nn.Linear(WIDTH, case.vocab, bias=False)
        if case.tied:
            self.output.weight = self.embedding.weight
        self.checkpointing = case.checkpointing

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            if self.checkpointing == "off":
                x = block(x)
            else:
                x = recomputed(block, type(block).__call__, self.checkpointing, (x,), {}, has_statistics=False)
        return self.output(self.norm(x))


class Block(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = Norm(WIDTH), Norm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3 * HEADS, -1).transpose(1, 2).chunk(3, dim=1)
        if self.attention == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Norm(nn.LayerNorm):
    """In float32 whatever its weights are in, as autocast computes it on a GPU, though not on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


def run(names: list[str], folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        measured = vars(measure(CASES[name]))
        (folder / f"{name}.{rank}.json").write_text(json.dumps(measured), encoding="utf-8")
    dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    by_processes: dict[int, list[str]] = {}
    for name in names or CASES:
        by_processes.setdefault(CASES[name].processes, []).append(name)
    for processes, together in by_processes.items():
        in_ranks(functools.partial(run, together, folder), processes, patience_s=60 * len(together))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
