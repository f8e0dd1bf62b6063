"""The ladder of hand optimisations of GPT-2 124M, and how much of it one line recovers.

    make gpu PYTHON=python3                                   # among the rest
    python benchmarks/gpu_ladder.py --out docs/results        # the package installed

The rungs are those of A. Karpathy, "Let's reproduce GPT-2 (124M)" (2024), https://github.com/karpathy/build-nanogpt, on
an A100: 1,000 ms a step of 16 x 1,024 tokens in float32 → TF32 333 → bfloat16 300 → torch.compile 130 → fused
attention 96 → a vocabulary of 50,304 93 → fused AdamW 90. Here each rung trains on its own, on this device, with random
weights and synthetic tokens. The lines of lightning-accel train the code of the first rung, unchanged; the vocabulary
is never changed. Their trials are told of the lesson's own run, 19,073 steps, and cut off after some seconds; what they
had come to is then timed in a loop without trials. What a line recovers is its share of the time that the whole ladder
saves.

Rungs and lines are measured one after the other, not in turns: they set flags of the whole process, and as processes of
their own two of them would not fit into the memory of one device. The first rung is measured again at the end, to show
what the device's mood is worth. Takes about ten minutes.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _gpu import arguments, is_possible, table, write
from _tuning_loop import Task, settled_loop
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import Plan

STEPS = 19_073  # of the lesson's run, 10 billion tokens at 2**19 a step
SECONDS = 100.0  # after which trials that have not settled are cut off
WARM_UP, BURST, ROUNDS = 5, 4, 5


@dataclass(frozen=True)
class Size:
    """Of the model and of a batch; the defaults are GPT-2's smallest and the lesson's batch."""

    dim: int = 768
    depth: int = 12
    num_heads: int = 12
    vocabulary: int = 50257
    seq_len: int = 1024
    batch: int = 16


TINY = Size(dim=32, depth=2, num_heads=2, vocabulary=97, seq_len=16, batch=2)
PADDED = 50304


class Attention(nn.Module):
    """Causal attention, in plain matrix products or by torch's fused kernels: (B, T, D) → (B, T, D)."""

    def __init__(self, size: Size, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.fused = size.num_heads, fused
        self.qkv, self.out = nn.Linear(size.dim, 3 * size.dim), nn.Linear(size.dim, size.dim)
        self.register_buffer("causal", torch.tril(torch.ones(size.seq_len, size.seq_len, dtype=torch.bool)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.num_heads, D // self.num_heads).transpose(1, 2) for part in self.qkv(x).split(D, -1)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            y = scores.masked_fill(~self.causal[:T, :T], -math.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, size: Size, fused: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size.dim), Attention(size, fused)
        self.norm2 = nn.LayerNorm(size.dim)
        self.mlp = nn.Sequential(nn.Linear(size.dim, 4 * size.dim), nn.GELU("tanh"), nn.Linear(4 * size.dim, size.dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """(B, T) tokens → (B, T, V) logits; the head is the embedding."""

    def __init__(self, size: Size, fused: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.dim), nn.Embedding(size.seq_len, size.dim)
        self.blocks = nn.ModuleList(Block(size, fused) for _ in range(size.depth))
        self.norm, self.head = nn.LayerNorm(size.dim), nn.Linear(size.dim, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Rung:
    """One more thing done by hand, on top of those before.

    Attributes:
        published_ms: What the lesson got by it.
    """

    name: str
    published_ms: int
    matmul: str = "high"
    bfloat16: bool = True
    compiled: bool = True
    fused_attention: bool = True
    padded: bool = True
    fused_steps: bool = True


RUNGS = (
    Rung("float32", 1000, "highest", *[False] * 5),
    Rung("+ TF32", 333, "high", *[False] * 5),
    Rung("+ bfloat16", 300, "high", True, *[False] * 4),
    Rung("+ torch.compile", 130, "high", True, True, *[False] * 3),
    Rung("+ fused attention", 96, "high", True, True, True, *[False] * 2),
    Rung("+ vocabulary of 50,304", 93, "high", True, True, True, True, False),
    Rung("+ fused AdamW", 90),
)
BETWEEN = ("+ torch.compile", "+ fused attention", "+ vocabulary of 50,304", "AccelPlugin(compile='auto')")
LINES = {
    "AccelPlugin()": Plan(),
    "AccelPlugin(compile='auto')": Plan(compile="auto"),
    "AccelPlugin(compile='on')": Plan(compile="on"),
}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def task(size: Size, fused: bool = False) -> Task:
    """The model, and the same synthetic batch again and again."""
    torch.manual_seed(0)
    module = GPT2(size, fused).to(device())
    tokens = torch.randint(min(size.vocabulary, 50257), (size.batch, size.seq_len + 1), device=device())

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        logits = module(inputs)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))

    return Task(module, loss, itertools.repeat((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())))


@contextmanager
def by_hand(rung: Rung, size: Size) -> Iterator[Callable[[], Any]]:
    """The step of a rung."""
    if rung.padded and size.vocabulary < PADDED and size is not TINY:
        size = Size(vocabulary=PADDED)
    work = task(size, rung.fused_attention)
    if rung.compiled:
        # Without a GPU the kernels are nobody's concern.
        work.module.compile(backend="inductor" if torch.cuda.is_available() else "eager")
    optimizer = torch.optim.AdamW(work.module.parameters(), lr=6e-4, fused=rung.fused_steps)
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if rung.bfloat16:
        autocast = lambda: torch.autocast(device().type, torch.bfloat16)  # noqa: E731

    def step() -> None:
        with autocast():
            loss = work.loss(next(work.batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(rung.matmul)
    try:
        yield step
    finally:
        torch.set_float32_matmul_precision(before)
        torch.compiler.reset()


@dataclass(frozen=True)
class Measured:
    """What came of a rung, or of a line.

    Attributes:
        step_ms: The median of the rounds.
        published_ms: The lesson's; None for a line.
        settled: What a line settled on, and after how many steps.
        compiled: What its report says of compilation.
    """

    name: str
    step_ms: float
    published_ms: int | None = None
    settled: str = ""
    compiled: str = ""


def measure_rung(rung: Rung, size: Size) -> Measured:
    with by_hand(rung, size) as step:
        return Measured(rung.name, step_ms(step), rung.published_ms)


def measure_line(name: str, plan: Plan, size: Size, seconds: float) -> Measured:
    before = torch.get_float32_matmul_precision()
    loop, found = settled_loop(lambda: task(size), plan, STEPS, seconds)
    took = step_ms(loop.step)
    loop.close()
    torch.compiler.reset()
    torch.set_float32_matmul_precision(before)
    return Measured(name, took, settled=str(found), compiled=found.compiled)


def step_ms(step: Callable[[], Any]) -> float:
    """Of one step: the median over rounds of some steps between two synchronisations, in milliseconds."""
    for _ in range(WARM_UP):
        step()
    return statistics.median(burst_ms(step) for _ in range(ROUNDS))


def burst_ms(step: Callable[[], Any]) -> float:
    _synchronize()
    start = time.perf_counter()
    for _ in range(BURST):
        step()
    _synchronize()
    return 1e3 * (time.perf_counter() - start) / BURST


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def row(run: Measured, first: float, last: float) -> list[str]:
    recovered = (first - run.step_ms) / (first - last)
    return [
        run.name,
        f"{run.step_ms:.1f}",
        f"{first / run.step_ms:.2f}x",
        f"{run.published_ms:,}" if run.published_ms else "",
        f"{recovered:.0%}" if run.settled else "",
        run.settled,
        run.compiled,
    ]


def main() -> None:
    parser = arguments("Measure the ladder of GPT-2 124M.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which a line's trials are cut off")
    parser.add_argument("--quick", action="store_true", help="only rungs and lines that say most, in three minutes")
    args = parser.parse_args()
    if not is_possible(args):
        return
    size, seconds = (TINY, min(5.0, args.seconds)) if args.dry_run else (Size(), args.seconds)
    again = replace(RUNGS[0], name=f"{RUNGS[0].name}, at the end", published_ms=0)
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_ACCEL_CACHE"] = folder
        rungs = [rung for rung in RUNGS if not (args.quick and rung.name in BETWEEN)]
        measures = [lambda rung=rung: measure_rung(rung, size) for rung in rungs]
        measures += [
            lambda name=name, plan=plan: measure_line(name, plan, size, seconds)
            for name, plan in LINES.items()
            if not (args.quick and name in BETWEEN)
        ]
        try:
            for measure in (*measures, lambda: measure_rung(again, size)):
                start = time.perf_counter()
                runs.append(measure())
                print(f"{runs[-1]}: {time.perf_counter() - start:.0f} s", flush=True)
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        finally:  # interrupted, too
            if len(runs) >= len(rungs):
                conclude(runs, runs[len(rungs) - 1].step_ms, seconds, args.out)


def conclude(runs: list[Measured], last: float, seconds: float, out: Path) -> None:
    """Prints and writes the table; ``last``: of the last rung, in milliseconds."""
    first = runs[0].step_ms
    heading = ["", "ms a step", "speed", "published, ms on an A100", "of the ladder recovered", "settled", "compile"]
    text = table([heading, *(row(run, first, last) for run in runs)])
    print(f"\n{text}")
    record = {"steps": STEPS, "seconds": seconds, "runs": [asdict(run) for run in runs]}
    write("ladder", out, record, "GPT-2 124M, 16 x 1,024 tokens a step, on", text)


if __name__ == "__main__":
    main()
