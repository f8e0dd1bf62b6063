"""A linear head and its cross-entropy: plain, and in pieces under ``Plan(techniques={"loss": "on"})``.

    python benchmarks/linear_cross_entropy.py [--rounds 7] [--tokens 2048] [--seconds 420] [--json docs/results]

Forward and backward of the head alone, with gradients of its input and its weight; the sides take turns, and ratios
are medians of paired rounds. The memory is the peak of a step beyond those gradients, which all sides return, beside
that of plain's logits. Errors are norms of differences over norms, the largest of loss and gradients: in float64
from plain, in other dtypes from plain in float64, ours and plain's own.

Where torch has ``F.linear_cross_entropy``, that takes its turns, too: with its own choice of pieces, and told to take a
sixteenth of the tokens at once, as ours does by itself; under autocast on what is cast by hand. Where all rounds do not
fit into a case's share of the seconds it has fewer, two at least; the table says how many. Takes ten minutes on
two cores, and twenty where they compute in bfloat16.

To answer: at most a tenth of plain's logits, at most 1.05x its time, 1e-12 in float64.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _measure import publish
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel import Plan, accelerate
from lightning_accel.claims.measure import interleaved_ms, median_ratio, peak_step_bytes
from lightning_accel.core.host import Host
from lightning_accel.experiment.tolerance import deviation

CASES = ((32768, 256), (32768, 768), (131072, 256))
CHECKED_TOKENS = 320
LEAST_ROUNDS = 2
OFF = {"precision": "32-true", "flash_attention": "off", "inplace_activations": "off", "memory_format": "off"}

Step = Callable[[], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One head in one dtype."""

    vocabulary: int
    width: int
    tokens: int
    dtype: str
    logits_mib: float
    plain_mib: float
    pieces_mib: float
    plain_ms: float
    pieces_ms: float
    time_ratio: float
    error: float
    plain_error: float
    rounds: int
    torch_mib: float | None = None
    torch_ratio: float | None = None
    torch_larger_mib: float | None = None
    torch_larger_ratio: float | None = None

    @property
    def share(self) -> float:
        """The peak of ours beside plain's logits."""
        return self.pieces_mib / self.logits_mib


class Side:
    """Steps of one head on one batch.

    Args:
        head: The layer; its own copy.
        rows: (N, H).
        target: (N,).
        autocast: The dtype of an autocast region around the step; None: none.
    """

    def __init__(self, head: nn.Linear, rows: Tensor, target: Tensor, autocast: torch.dtype | None = None) -> None:
        self.head, self.rows, self.target, self.autocast = head, rows.detach().requires_grad_(), target, autocast
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext

    def loss(self) -> Tensor:
        return F.cross_entropy(self.head(self.rows), self.target)

    def step(self) -> list[Tensor]:
        """Loss and gradients; none of them stays."""
        device = self.rows.device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None), self.around():
            loss = self.loss()
        loss.backward()
        assert self.rows.grad is not None
        assert self.head.weight.grad is not None
        results = [loss.detach(), self.rows.grad, self.head.weight.grad]
        self.rows.grad = self.head.weight.grad = None
        return results


class InPieces(Side):
    """Under the technique, past its trial."""

    def __init__(self, head: nn.Linear, rows: Tensor, target: Tensor, autocast: torch.dtype | None = None) -> None:
        super().__init__(head, rows, target, autocast)
        model = nn.Sequential(head)
        handle = accelerate(model, Plan().replace(**OFF, loss="on", trust="checked"), host=Host.detect(rows.device))
        self.around = handle.step
        for _ in range(2):
            self.step()
        assert handle.report.applied("loss"), handle.report.to_text()


class Torchs(Side):
    """By torch's own function, with its own choice of pieces."""

    def options(self) -> Any:
        return torch.nn.LinearCrossEntropyOptions()

    @override
    def loss(self) -> Tensor:
        rows, weight = (t if self.autocast is None else t.to(self.autocast) for t in (self.rows, self.head.weight))
        return F.linear_cross_entropy(rows, weight, self.target, options=self.options())


class TorchsLarger(Torchs):
    """The same, in pieces as large as ours are by themselves."""

    @override
    def options(self) -> Any:
        return torch.nn.LinearCrossEntropyOptions(batch_chunk_size=max(1, len(self.rows) // 16))


def made(side: type[Side], drawn: tuple[Tensor, Tensor, Tensor], autocast: torch.dtype | None = None) -> Side:
    weight, rows, target = drawn
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta").to_empty(device=weight.device)
    head.weight = nn.Parameter(weight.clone())
    return side(head, rows, target, autocast)


def beyond_gradients_mib(side: Side) -> float:
    """The peak of a step, which is not the first, without the gradients that it returns."""
    return (peak_step_bytes(side.step) - side.head.weight.nbytes - side.rows.nbytes) / 2**20


def draw(vocabulary: int, width: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    weight, rows = torch.randn(vocabulary, width) / width**0.5, torch.randn(tokens, width)
    return weight.to(device), rows.to(device), torch.randint(vocabulary, (tokens,)).to(device)


def errors(drawn: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """Ours and plain's, on a few tokens; in float64 plain is the truth."""
    weight, rows, target = drawn[0], drawn[1][:CHECKED_TOKENS], drawn[2][:CHECKED_TOKENS]
    truth = made(Side, (weight.double(), rows.double(), target)).step()
    if dtype == torch.float64:
        return deviation(made(InPieces, (weight.double(), rows.double(), target)).step(), truth).noise, 0.0
    autocast = None if dtype == torch.float32 else dtype
    ours, plain = (
        deviation(made(kind, (weight, rows, target), autocast).step(), truth).noise for kind in (InPieces, Side)
    )
    return ours, plain


def in_rounds(sides: dict[str, Side], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of the steps, side by side, after a round that warms up; fewer rounds where seconds are short."""
    steps = {name: side.step for name, side in sides.items()}
    start = time.perf_counter()
    interleaved_ms(steps, rounds=0, warm_up=1)
    round_s = time.perf_counter() - start
    possible = seconds / round_s - 2  # without that one, and as much for the peaks of memory
    return interleaved_ms(steps, rounds=int(max(LEAST_ROUNDS, min(rounds, possible))), warm_up=0)


def measure(
    vocabulary: int,
    width: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    seconds: float = math.inf,
) -> Measured:
    drawn = draw(vocabulary, width, tokens, device)
    autocast = None if dtype == torch.float32 else dtype
    kinds: dict[str, type[Side]] = {"plain": Side, "pieces": InPieces}
    if hasattr(F, "linear_cross_entropy"):
        kinds |= {"torch": Torchs, "torch_larger": TorchsLarger}
    sides = {name: made(kind, drawn, autocast) for name, kind in kinds.items()}
    spent = in_rounds(sides, rounds, seconds)
    mib = {name: beyond_gradients_mib(side) for name, side in sides.items()}
    ratios = {name: median_ratio(spent[name], spent["plain"]) for name in sides}
    error, plain_error = errors(drawn, dtype)
    return Measured(
        vocabulary=vocabulary,
        width=width,
        tokens=tokens,
        dtype=str(dtype).removeprefix("torch."),
        logits_mib=tokens * vocabulary * dtype.itemsize / 2**20,
        plain_mib=mib["plain"],
        pieces_mib=mib["pieces"],
        plain_ms=statistics.median(spent["plain"]),
        pieces_ms=statistics.median(spent["pieces"]),
        time_ratio=ratios["pieces"],
        error=error,
        plain_error=plain_error,
        rounds=len(spent["plain"]),
        torch_mib=mib.get("torch"),
        torch_ratio=ratios.get("torch"),
        torch_larger_mib=mib.get("torch_larger"),
        torch_larger_ratio=ratios.get("torch_larger"),
    )


COLUMNS = (
    *("vocabulary", "width", "tokens", "", "plain's logits, MiB", "plain, MiB", "in pieces, MiB", "of the logits"),
    *("plain, ms", "in pieces", "error, float64", "error", "plain's", "torch's own pieces, MiB", "time"),
    *("torch's in larger pieces, MiB", "time", "rounds"),
)


def row(run: Measured, error_float64: float) -> list[str]:
    return [
        *(f"{run.vocabulary:,}", str(run.width), f"{run.tokens:,}", run.dtype),
        *(f"{run.logits_mib:,.0f}", f"{run.plain_mib:,.0f}", f"{run.pieces_mib:,.1f}", f"{run.share:.1%}"),
        *(f"{run.plain_ms:,.0f}", f"{run.time_ratio:.2f}x", f"{error_float64:.0e}", f"{run.error:.1e}"),
        f"{run.plain_error:.1e}",
        *_torchs(run.torch_mib, run.torch_ratio),
        *_torchs(run.torch_larger_mib, run.torch_larger_ratio),
        str(run.rounds),
    ]


def _torchs(mib: float | None, ratio: float | None) -> list[str]:
    return ["", ""] if mib is None or ratio is None else [f"{mib:,.1f}", f"{ratio:.2f}x"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=420, help="for all cases together; two rounds each at least")
    args = parser.parse_known_args()[0]
    device = torch.device("cpu")
    dtypes = [torch.float32, *([torch.bfloat16] if Host.detect(device).native_bf16 else [])]
    cases = [(*sizes, dtype) for sizes in CASES for dtype in dtypes]
    rows, details = [], []
    end = time.perf_counter() + args.seconds
    for number, (vocabulary, width, dtype) in enumerate(cases):
        error_float64, _ = errors(draw(vocabulary, width, CHECKED_TOKENS, device), torch.float64)
        share_s = (end - time.perf_counter()) / (len(cases) - number)
        run = measure(vocabulary, width, args.tokens, dtype, device, args.rounds, share_s)
        rows.append(row(run, error_float64))
        details.append({**vars(run), "error_float64": error_float64})
        print(*rows[-1], flush=True)
    command = (
        f"python benchmarks/linear_cross_entropy.py --rounds {args.rounds} --tokens {args.tokens}"
        f" --seconds {args.seconds:g}"
    )
    publish("linear_cross_entropy", command, COLUMNS, rows, details, by_machine=True)


if __name__ == "__main__":
    main()
