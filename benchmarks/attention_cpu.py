"""What flash attention does on a CPU: hand-written attention plain and fused, the module, a call, the first step.

    python benchmarks/attention_cpu.py [--quick] [--json docs/results]

Every side of a row has the same weights and inputs, and the sides take turns. Ratios and differences are medians of
paired rounds; beside them stand the quartiles, which say how far to trust a figure. `auto` is
``accelerate(module, Plan(techniques={"flash_attention": "auto"}))`` with everything else off, past its trial; its
``handle.step()`` is part of what is timed. The first step is measured in a process of its own per run, imports of torch
left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from _measure import publish
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.claims.measure import interleaved_ms
from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention

COLUMNS = ["what", "size", "asked for", "measured", "quartiles", "median times"]
CALLS = 200  # of a tiny module, timed as one


class HandWritten(nn.Module):
    """Causal self-attention as most people write it: (B, T, heads * head_dim) → the same.

    Args:
        heads: How many.
        head_dim: Width of each.
        causal_length: Length of the causal mask; 0: no mask.
    """

    def __init__(self, heads: int, head_dim: int, causal_length: int = 0) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        future = torch.ones(causal_length, causal_length, dtype=torch.bool).triu(1) if causal_length else None
        self.register_buffer("future", future, persistent=False)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, (B, H, T, D) each."""
        return self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.future is not None:
            scores = scores.masked_fill(self.future[: x.shape[1], : x.shape[1]], float("-inf"))
        return self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(x.shape))


class WithSdpa(HandWritten):
    """The same module with torch's fused attention called in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.future is not None)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """A pre-norm transformer block around it."""

    def __init__(self, heads: int, head_dim: int, length: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = HandWritten(heads, head_dim, length)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SdpaByHand(nn.Module):
    """What a careful user writes in place of ``nn.MultiheadAttention``, with its parameters."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = module.num_heads
        self.weight, self.bias, self.out = module.in_proj_weight, module.in_proj_bias, module.out_proj

    def forward(self, x: Tensor) -> Tensor:
        qkv = F.linear(x, self.weight, self.bias).view(*x.shape[:2], 3, self.heads, -1)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind())
        return F.linear(y.transpose(1, 2).reshape(x.shape), self.out.weight, self.out.bias)


@dataclass
class Table:
    """The rows so far, and everything that they were made of."""

    rows: list[list[str]] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        what: str,
        size: str,
        asked: str,
        values: Sequence[float],
        text: Callable[[float], str],
        times: str,
        **details: Any,
    ) -> None:
        """A row of the median of ``values`` and their quartiles."""
        low, _, high = statistics.quantiles(values, n=4)
        quartiles = f"{text(low)} to {text(high)}"
        self.rows.append([what, size, asked, text(statistics.median(values)), quartiles, times])
        self.details.append({"what": what, "size": size, "values": list(values), **details})
        print("  ".join(self.rows[-1]), flush=True)


def attention_plan(backend: str) -> Plan:
    """Flash attention and nothing else."""
    return Plan(
        precision="32-true",
        techniques={"flash_attention": backend, "memory_format": "off", "inplace_activations": False},
    )


def training_pass(module: nn.Module, x: Tensor, step: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """Forward and backward; no gradient is left."""
    with step():
        loss = module(x).float().square().mean()
    loss.backward()
    x.grad = None
    for parameter in module.parameters():
        parameter.grad = None


def timed(sides: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every side, in as many rounds as ``seconds`` have room for: 5 to 300."""
    first = interleaved_ms(sides, rounds=1, warm_up=2)
    round_s = sum(ms for (ms,) in first.values()) / 1e3
    return interleaved_ms(sides, rounds=min(300, max(5, int(seconds / round_s))), warm_up=1)


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def ms(name: str, values: Sequence[float]) -> str:
    return f"{name} {statistics.median(values):.3g} ms"


def as_speed(ratio: float) -> str:
    return f"{ratio:.2f}x"


def as_slowdown(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%"


def decision(handle: AcceleratedModel) -> str:
    """Where the one site of a model goes: the name of a backend, or ``original``."""
    verdicts = handle.engine.decisions["flash_attention"].values()
    return ", ".join(sorted({choice for verdict in verdicts for choice in verdict.choices.values()})) or "refused"


# -- hand-written attention ------------------------------------------------------------------------------------------


def hand_written(
    table: Table, *, length: int, batch: int, causal: bool, bf16: bool, heads: int, seconds: float
) -> None:
    """One row: forward and backward, plain against ``auto``."""
    torch.manual_seed(0)
    plain = HandWritten(heads, 64, length if causal else 0)
    fused = deepcopy(plain)
    x = torch.randn(batch, length, heads * 64, requires_grad=True)
    handle = accelerate(fused, attention_plan("auto"))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for _ in range(2):
            training_pass(fused, x, handle.step)
        sides = {
            "plain": lambda: training_pass(plain, x),
            "auto": lambda: training_pass(fused, x, handle.step),
        }
        spent = timed(sides, seconds)
    took = decision(handle)
    handle.undo()
    torch._dynamo.reset()
    is_long = length >= 1024
    pairs = ratios(spent["plain"], spent["auto"]) if is_long else ratios(spent["auto"], spent["plain"])
    table.add(
        f"hand-written attention, {'causal mask' if causal else 'no mask'}: `auto` beside plain,"
        f" {'speed' if is_long else 'time'}",
        f"{batch} x {length}, {'bf16 autocast' if bf16 else 'float32'}",
        "at least 3x" if is_long else "at most +3%",
        pairs,
        as_speed if is_long else as_slowdown,
        f"{ms('plain', spent['plain'])}, {ms('auto', spent['auto'])} ({took})",
        took=took,
        spent_ms=spent,
    )


# -- the module ------------------------------------------------------------------------------------------------------


def multihead(table: Table, *, shape: tuple[int, int, int], heads: int, training: bool, seconds: float) -> None:
    """Two rows: FlashMultiheadAttention against torch's module, and against SDPA by hand."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(shape[-1], heads, batch_first=True)
    ours = FlashMultiheadAttention(shape[-1], heads, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    modules = {"ours": ours, "nn.MultiheadAttention": theirs, "SDPA by hand": SdpaByHand(deepcopy(theirs))}
    x = torch.randn(shape, requires_grad=training)

    def run(module: nn.Module) -> Tensor:
        if isinstance(module, nn.MultiheadAttention):
            return module(x, x, x, need_weights=False)[0]
        return module(x)

    def step(module: nn.Module) -> None:
        if not training:
            run(module)
            return
        run(module).square().mean().backward()
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None

    for module in modules.values():
        module.train(training)
    with torch.set_grad_enabled(training):
        spent = timed({name: lambda m=module: step(m) for name, module in modules.items()}, seconds)
    for other in ("nn.MultiheadAttention", "SDPA by hand"):
        table.add(
            f"FlashMultiheadAttention beside {other},"
            f" {'forward and backward' if training else 'forward in evaluation'}, time",
            f"{shape}, float32",
            "at most +3%",
            ratios(spent["ours"], spent[other]),
            as_slowdown,
            f"{ms('ours', spent['ours'])}, {ms('other', spent[other])}",
            spent_ms={name: spent[name] for name in ("ours", other)},
        )


# -- a call ----------------------------------------------------------------------------------------------------------


def dispatch_cost(table: Table, *, with_gradients: bool, rounds: int) -> None:
    """One row: what a fused call takes more than the same module written with SDPA.

    On one thread: what is asked is the price of finding the way, not of waking threads for 32 positions.
    """
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fused, direct = HandWritten(2, 16, 32), WithSdpa(2, 16, 32)
    direct.load_state_dict(fused.state_dict())
    x = torch.randn(1, 32, 32)
    handle = accelerate(fused, attention_plan("sdpa"))
    for _ in range(2):
        training_pass(fused, x, handle.step)

    def calls(module: nn.Module) -> None:
        for _ in range(CALLS):
            module(x)

    with torch.set_grad_enabled(with_gradients):
        assert torch.allclose(fused(x), direct(x), atol=1e-5)
        spent = interleaved_ms({"fused": lambda: calls(fused), "direct": lambda: calls(direct)}, rounds=rounds)
    assert decision(handle) == "sdpa", handle.report.to_text()
    handle.undo()
    torch._dynamo.reset()
    torch.set_num_threads(threads)
    us = {name: [1e3 * value / CALLS for value in values] for name, values in spent.items()}
    table.add(
        f"a call, {'with gradients' if with_gradients else 'no_grad'}: beyond the same module written with SDPA",
        "1 x 32, float32, 1 thread",
        "under 60 µs",
        [a - b for a, b in zip(us["fused"], us["direct"], strict=True)],
        lambda value: f"{value:.1f} µs",
        f"found {statistics.median(us['fused']):.0f} µs, written {statistics.median(us['direct']):.0f} µs",
        call_us=us,
    )


# -- the first step --------------------------------------------------------------------------------------------------


def first_steps_s(backend: str, layers: int) -> list[float]:
    """Seconds of ``accelerate`` with the first step, and of the second: in this process, which must be fresh."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(4, 64, 128) for _ in range(layers)))
    x = torch.randn(4, 128, 256)
    training_pass(nn.Sequential(Block(4, 64, 128)), x)  # torch's own first-time costs are not the technique's
    start = time.perf_counter()
    handle = accelerate(model, attention_plan(backend))
    spent = []
    for _ in range(2):
        training_pass(model, x, handle.step)
        spent.append(time.perf_counter() - start)
        start = time.perf_counter()
    assert backend == "off" or handle.engine.decisions["flash_attention"], handle.report.to_text()
    return spent


def first_step(table: Table, *, layers: int, rounds: int) -> None:
    """Two rows: what the first step, and the second, take more with ``auto`` than with ``off``."""
    spent: dict[str, list[list[float]]] = {"auto": [], "off": []}
    for round_ in range(rounds):
        for backend in ("auto", "off") if round_ % 2 == 0 else ("off", "auto"):
            command = [sys.executable, __file__, "--first-steps", backend, "--layers", str(layers)]
            child = subprocess.run(command, capture_output=True, text=True, check=False)
            if child.returncode:
                sys.exit(child.stderr)
            spent[backend].append(json.loads(child.stdout.splitlines()[-1]))
    for index, which in enumerate(("first step, accelerate() included", "second step, the first with it in force")):
        auto, off = ([run[index] for run in spent[backend]] for backend in ("auto", "off"))
        table.add(
            f"finding and trialling, {layers} layers: the {which}, beyond `off`",
            "4 x 128, float32",
            "under 5 s" if index == 0 else "",
            [a - b for a, b in zip(auto, off, strict=True)],
            lambda value: f"{value:.2f} s",
            f"auto {statistics.median(auto):.2f} s, off {statistics.median(off):.2f} s",
            spent_s={"auto": auto, "off": off},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--first-steps", choices=("auto", "off"), help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=24, help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()
    if options.first_steps:
        print(json.dumps(first_steps_s(options.first_steps, options.layers)))
        return
    quick = options.quick
    seconds, heads = (0.2, 2) if quick else (4.0, 8)
    table = Table()
    for causal in (True, False):
        length = 1024 if quick else 4096
        hand_written(table, length=length, batch=1, causal=causal, bf16=False, heads=heads, seconds=2 * seconds)
    for bf16 in (True, False):
        for length in (128, 256, 512):
            batch = 1 if quick else 8
            hand_written(table, length=length, batch=batch, causal=True, bf16=bf16, heads=heads, seconds=seconds)
    for shape in ((2, 32, 64), (1, 128, 64)) if quick else ((8, 128, 256), (1, 2048, 256)):
        for training in (True, False):
            multihead(table, shape=shape, heads=4, training=training, seconds=seconds)
    for with_gradients in (False, True):
        dispatch_cost(table, with_gradients=with_gradients, rounds=3 if quick else 30)
    first_step(table, layers=2 if quick else 24, rounds=2 if quick else 3)
    publish("attention_cpu", "python benchmarks/attention_cpu.py", COLUMNS, table.rows, table.details)


if __name__ == "__main__":
    main()
