"""Attention on a GPU: matmul-softmax-matmul against every backend that is installed, over the length.

    make gpu PYTHON=python3                                        # among the rest
    python benchmarks/gpu_attention.py --out docs/results          # the package installed

8 heads of 64, batch 32 where memory lets it; queries, keys and values lie as a packed projection leaves them. The
sides of a case take turns in bursts of calls between two CUDA events; medians. FLOPs are those of the two products,
4 B H T S D forward and 2.5 times that backward, half of it when causal, hidden keys left out: what was asked for, not
what a kernel spent. The error is relative, in norm, against float64, on 128 queries of one head. Takes about five
minutes; `--backends` and `--lengths` make it shorter.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from _gpu import arguments, is_possible, write
from torch import Tensor

from lightning_accel.callbacks._step_watch import peak_flops_per_sec
from lightning_accel.claims.measure import peak_step_bytes
from lightning_accel.core.host import Host
from lightning_accel.techniques.flash_attention.backends import Backend, attend, installed_backends
from lightning_accel.techniques.flash_attention.call import AttentionCall

Kind = Literal["all keys", "causal", "half padding", "relative bias"]

HEADS, HEAD_DIM, MAX_BATCH = 8, 64, 32
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Scores, scaled, masked, weights and two gradients of them, each (B, H, T, T), stand beside each other by hand.
SCORES_AT_ONCE, SHARE_OF_MEMORY = 6, 0.8
BURST_MS = 20
BY_HAND = "by hand"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention to compute in every way.

    Attributes:
        kind: Which keys a query sees, or what is added to their scores.
        length: T, and S.
        batch: B.
        heads: H.
        head_dim: D.
        dtype: Of queries, keys and values, and of the bias.
    """

    kind: Kind
    length: int
    batch: int
    heads: int = HEADS
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.bfloat16

    @property
    def forward_flops(self) -> float:
        seen = {"causal": 0.5, "half padding": 0.5}.get(self.kind, 1.0)
        return seen * 4 * self.batch * self.heads * self.length**2 * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One side of a case; either its numbers or what went wrong. TFLOP/s are of the case's FLOPs, whoever counts."""

    case: Case
    side: str
    forward_ms: float | None = None
    training_ms: float | None = None
    peak_mib: float | None = None
    error: float | None = None
    failure: str = ""

    @property
    def forward_tflops(self) -> float | None:
        return None if self.forward_ms is None else self.case.forward_flops / self.forward_ms / 1e9

    @property
    def training_tflops(self) -> float | None:
        return None if self.training_ms is None else 3.5 * self.case.forward_flops / self.training_ms / 1e9


# -- the sides of a case ---------------------------------------------------------------------------------------------


def make_call(case: Case, device: torch.device) -> AttentionCall:
    """Random inputs that ask for gradients."""
    torch.manual_seed(0)
    size = (case.batch, case.length, 3, case.heads, case.head_dim)
    packed = torch.randn(size, device=device, dtype=case.dtype)
    q, k, v = (part.transpose(1, 2).requires_grad_() for part in packed.unbind(2))
    mask = None
    if case.kind == "half padding":
        mask = (torch.arange(case.length, device=device) < case.length // 2).expand(case.batch, 1, 1, -1)
    elif case.kind == "relative bias":
        mask = torch.randn(1, case.heads, case.length, case.length, device=device, dtype=case.dtype).requires_grad_()
    return AttentionCall(query=q, key=k, value=v, mask=mask, is_causal=case.kind == "causal")


def by_hand(call: AttentionCall, future: Tensor | None) -> Tensor:
    """Product, softmax, product; ``future`` is the mask that a module would hold in a buffer."""
    scores = call.query @ call.key.transpose(-2, -1) * call.true_scale
    if future is not None:
        scores = scores.masked_fill(future, -math.inf)
    if call.mask is not None:
        is_bool = call.mask.dtype == torch.bool
        scores = scores.masked_fill(~call.mask, -math.inf) if is_bool else scores + call.mask
    return scores.softmax(dim=-1) @ call.value


def make_sides(
    case: Case, call: AttentionCall, backends: Sequence[Backend]
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Name → forward pass, and name → why it is not one of them."""
    future = None
    if case.kind == "causal":
        future = torch.ones(case.length, case.length, dtype=torch.bool, device=call.query.device).triu(1)
    sides: dict[str, Callable[[], Tensor]] = {BY_HAND: lambda: by_hand(call, future)}
    lacking = {backend.name: backend.lacks(call) for backend in backends}
    for backend in backends:
        if lacking[backend.name] is None:
            sides[backend.name] = lambda backend=backend: attend(call, backend)
    return sides, {name: lack for name, lack in lacking.items() if lack is not None}


@torch.no_grad()
def relative_error(call: AttentionCall, out: Tensor) -> float:
    """Of 128 queries of the first sample's first head, against float64."""
    rows = torch.linspace(0, call.query.shape[2] - 1, 128, device=out.device).long()
    scores = call.query[0, 0, rows].double() @ call.key[0, 0].double().T * call.true_scale
    if call.is_causal:
        columns = torch.arange(call.key.shape[2], device=out.device)
        scores = scores.masked_fill(columns > rows[:, None], -math.inf)
    if call.mask is not None:
        mask = call.mask.expand(*call.query.shape[:2], call.query.shape[2], -1)[0, 0, rows]
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    expected = scores.softmax(dim=-1) @ call.value[0, 0].double()
    return float((out[0, 0, rows].double() - expected).norm() / expected.norm())


# -- measuring -------------------------------------------------------------------------------------------------------


def burst_ms(call: Callable[[], Any], calls: int) -> float:
    """Milliseconds a call, of several in a row."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e3 * (time.perf_counter() - begin) / calls
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def median_ms(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Of every side; they take turns, in the other direction every other round."""
    names = list(sides)
    calls = {}
    for name, side in sides.items():
        burst_ms(side, 2)
        calls[name] = max(1, min(100, int(BURST_MS / burst_ms(side, 2))))
    spent: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            spent[name].append(burst_ms(sides[name], calls[name]))
    return {name: statistics.median(values) for name, values in spent.items()}


def measure(case: Case, backends: Sequence[Backend], device: torch.device, rounds: int) -> list[Measured]:
    """All sides of one case, the hand-written one first."""
    torch._dynamo.reset()  # a kernel that is compiled is compiled for this length, not for any
    call = make_call(case, device)
    forwards, failures = make_sides(case, call, backends)
    wanted = [t for t in (call.query, call.key, call.value, call.mask) if t is not None and t.requires_grad]
    cotangent = torch.randn_like(call.query)

    def training(forward: Callable[[], Tensor]) -> None:
        torch.autograd.grad(forward(), wanted, cotangent)

    errors, peaks = {}, {}
    for name, forward in list(forwards.items()):
        try:
            errors[name] = relative_error(call, forward())
            training(forward)
            peaks[name] = peak_step_bytes(lambda forward=forward: training(forward)) / 2**20
        except Exception as error:  # one kernel that fails must not cost the others' figures
            failures[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
            del forwards[name]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    forward_ms = median_ms(forwards, rounds)
    training_ms = median_ms({name: lambda f=forward: training(f) for name, forward in forwards.items()}, rounds)
    results = [
        Measured(
            case=case,
            side=name,
            forward_ms=forward_ms[name],
            training_ms=training_ms[name],
            peak_mib=peaks[name],
            error=errors[name],
        )
        for name in forwards
    ]
    return results + [Measured(case=case, side=name, failure=reason) for name, reason in failures.items()]


def batch_for(length: int, itemsize: int, memory: int) -> int:
    """The largest power of two up to 32 at which attention written by hand fits."""
    batch = MAX_BATCH
    while batch > 1 and SCORES_AT_ONCE * batch * HEADS * length**2 * itemsize > SHARE_OF_MEMORY * memory:
        batch //= 2
    return batch


def cases(lengths: Sequence[int], memory: int) -> list[Case]:
    def case(kind: Kind, length: int, dtype: torch.dtype = torch.bfloat16) -> Case:
        return Case(kind=kind, length=length, batch=batch_for(length, dtype.itemsize, memory), dtype=dtype)

    middle = 1024 if 1024 in lengths else lengths[0]
    kinds: tuple[Kind, ...] = ("all keys", "causal")
    extra: tuple[Kind, ...] = ("half padding", "relative bias")
    return [
        *(case(kind, length) for kind in kinds for length in lengths),
        *(case(kind, middle) for kind in extra),
        case("all keys", middle, torch.float32),  # the claim's relative error, under 0.01%, is not for bfloat16
    ]


# -- the table -------------------------------------------------------------------------------------------------------


def table(results: Sequence[Measured], peaks: Mapping[torch.dtype, float | None]) -> str:
    """A Markdown table; ratios are the hand-written side's time over this one's."""
    times = ("ms", "faster", "TFLOP/s", "of peak")
    rows = [
        ["attention", "tokens", "batch", "side"]
        + [f"{which}, {what}" for which in ("forward", "with backward") for what in times]
        + ["peak, MiB", "error"]
    ]
    hand: dict[Case, Measured] = {run.case: run for run in results if run.side == BY_HAND}
    for run in results:
        case, plain, peak = run.case, hand[run.case], peaks[run.case.dtype]
        row = [f"{case.kind}, {_name(case.dtype)}", f"{case.length:,}", str(case.batch), run.side]
        for ms, plain_ms, tflops in (
            (run.forward_ms, plain.forward_ms, run.forward_tflops),
            (run.training_ms, plain.training_ms, run.training_tflops),
        ):
            row += [
                _text(ms, ".3f"),
                _text(None if ms is None or plain_ms is None else plain_ms / ms, ".2f", "x"),
                _text(tflops, ".1f"),
                _text(None if tflops is None or peak is None else 1e12 * tflops / peak, ".1%"),
            ]
        row += [_text(run.peak_mib, ",.0f"), _text(run.error, ".1e")]
        if not run.failure:
            rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    missing: dict[str, list[str]] = {}
    for run in results:
        if run.failure:
            where = f"{run.case.kind}, {_name(run.case.dtype)}, {run.case.length:,}"
            missing.setdefault(f"{run.side}: {run.failure}", []).append(where)
    notes = [f"- {reason} ({'; '.join(where)})" for reason, where in missing.items()]
    return "\n".join([*lines, *(["", "Not in the table:", "", *notes] if notes else [])])


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = arguments("Measure attention on a GPU.")
    parser.add_argument("--rounds", type=int, default=7, help="how many bursts of every side")
    parser.add_argument("--backends", help="of those installed only these, as in sdpa,flash-attn")
    parser.add_argument("--lengths", help="instead of 512 … 16384, as in 1024,4096")
    args = parser.parse_args()
    if not is_possible(args):
        return
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    memory = torch.cuda.get_device_properties(0).total_memory if has_gpu else 1 << 30
    lengths = tuple(map(int, args.lengths.split(","))) if args.lengths else LENGTHS
    if args.dry_run:
        lengths, args.rounds, memory = (128, 256), 1, 1 << 22
    backends = installed_backends(Host.detect(device))
    if args.backends:
        backends = [backend for backend in backends if backend.name in args.backends.split(",")]
    print(f"backends: {', '.join(backend.name for backend in backends)}", flush=True)
    peaks = {
        torch.bfloat16: peak_flops_per_sec(device, "bf16-mixed"),
        torch.float32: peak_flops_per_sec(device, "32-true"),
    }
    results: list[Measured] = []
    for case in cases(lengths, memory):
        start = time.perf_counter()
        results += measure(case, backends, device, args.rounds)
        seconds = time.perf_counter() - start
        print(f"{case.kind}, {_name(case.dtype)}, {case.length} x {case.batch}: {seconds:.0f} s", flush=True)
    text = table(results, peaks)
    print(f"\n{text}")
    values = []
    for run in results:
        case = {**asdict(run.case), "dtype": _name(run.case.dtype)}
        rates = {"forward_tflops": run.forward_tflops, "training_tflops": run.training_tflops}
        values.append({**asdict(run), "case": case, **rates})
    peak_tflops = {_name(dtype): None if peak is None else peak / 1e12 for dtype, peak in peaks.items()}
    rated = ", ".join(f"{name} {peak:.0f}" for name, peak in peak_tflops.items() if peak is not None)
    heading = (
        f"Attention, {HEADS} heads of {HEAD_DIM}. `faster`: times the speed of matmul-softmax-matmul."
        f" Matrix peak, TFLOP/s: {rated or 'not known'}. Measured on"
    )
    write("attention", args.out, {"peak_tflops": peak_tflops, "results": values}, heading, text)


if __name__ == "__main__":
    main()
