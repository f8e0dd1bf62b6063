"""The largest batch that fits into 24 GiB: a GPT of 350M parameters on sequences of 2,048 tokens, in every mode.

    make gpu PYTHON=python3                                     # among the rest
    python benchmarks/gpu_memory.py --out docs/results          # the package installed

Each mode runs in a process of its own whose allocator may have 24 GiB of the card
(`torch.cuda.set_per_process_memory_fraction`), with bf16 autocast and fused AdamW. A batch fits if every step up to
and past the plan does. To answer: the planner's largest batch is the largest of all, or equals it and is faster.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from _gpu import arguments, is_possible, table, write
from _networks import Transformer
from torch import nn
from torch.nn import functional as F

from lightning_accel import Plan, accelerate
from lightning_accel.core.byte_size import format_bytes

LIMIT_BYTES = 24 << 30
BUDGET_SHARE = 0.93  # of the limit: allocators round, and leave gaps that a budget of allocated bytes knows nothing of
VOCABULARY = 50304
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"gradient_checkpointing": "selective"},
    "full": {"gradient_checkpointing": "full"},
    "host": {"activation_offloading": "host"},
    "full + host": {"gradient_checkpointing": "full", "activation_offloading": "host"},
    "budget": {"memory_budget": round(BUDGET_SHARE * LIMIT_BYTES)},
}
STEPS, TIMED_STEPS = 16, 6
MAX_BATCH = 256


def try_batch(mode: str, batch: int, dry_run: bool) -> dict[str, Any] | None:
    """Trains a few steps on ``batch`` samples; None where they do not fit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, blocks, length = (32, 2, 16) if dry_run else (1024, 24, 2048)
    torch.manual_seed(0)
    try:
        model: nn.Module = Transformer(blocks, width, width // 64 or 1, vocabulary=VOCABULARY).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        settings = {"inplace_activations": False, "memory_format": "off", "flash_attention": "off"}
        handle = accelerate(model, Plan().replace(precision="bf16-mixed", **settings, **MODES[mode]))
        tokens = torch.randint(VOCABULARY, (batch, length + 1), device=device)
        spent = []
        for _ in range(STEPS):
            start = time.perf_counter()
            with handle.step():
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            if device == "cuda":
                torch.cuda.synchronize()
            spent.append(time.perf_counter() - start)
        seconds = statistics.median(spent[-TIMED_STEPS:])
        plan = handle.memory_schedule
        handle.undo()
        return {
            "batch": batch,
            "samples_per_sec": batch / seconds,
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
            "plan": "" if plan is None else plan.table(),
        }
    except (torch.OutOfMemoryError, ValueError) as error:
        if isinstance(error, ValueError) and "does not fit" not in str(error) and "do not hold" not in str(error):
            raise
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def largest(mode: str, dry_run: bool) -> dict[str, Any] | None:
    """What the largest batch that fits measured: doubled until one does not, then bisected to an eighth."""
    best, low, high = None, 0, 1
    while high <= (2 if dry_run else MAX_BATCH) and (found := try_batch(mode, high, dry_run)) is not None:
        best, low, high = found, high, 2 * high
    while not dry_run and high - low > max(1, low // 8):
        middle = (low + high) // 2
        found = try_batch(mode, middle, dry_run)
        best, low, high = (found, middle, high) if found is not None else (best, low, middle)
    return best


def in_process(mode: str, dry_run: bool) -> dict[str, Any] | None:
    """:func:`largest` in a process with a capped allocator; None where nothing fits."""
    command = [sys.executable, __file__, "--mode", mode, *(["--dry-run"] if dry_run else [])]
    # Segments that grow: the modes are compared by what they need, not by how their allocations happen to fall.
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        print(f"{mode}: failed\n{done.stderr[-2000:]}", flush=True)
        return None
    found: dict[str, Any] | None = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = arguments("Measure the largest batch that fits into 24 GiB.")
    parser.add_argument("--mode", choices=MODES, help="one mode, in this process, as JSON")
    args = parser.parse_args()
    if not is_possible(args):
        return
    if args.mode:
        if torch.cuda.is_available():
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT_BYTES / total))
        print(json.dumps(largest(args.mode, args.dry_run)))
        return
    results: dict[str, dict[str, Any] | None] = {}
    for mode in MODES:
        results[mode] = in_process(mode, args.dry_run)
        print(f"{mode}: {(results[mode] or {}).get('batch', 'nothing fits')}", flush=True)
    rows = [["mode", "largest batch", "samples/s", "peak"]]
    for mode, found in results.items():
        if found is None:
            rows.append([mode, "none fits", "", ""])
        else:
            speed, peak = f"{found['samples_per_sec']:.1f}", format_bytes(found["peak_bytes"])
            rows.append([mode, str(found["batch"]), speed, peak])
    text = table(rows)
    plan = (results["budget"] or {}).get("plan", "")
    print(f"\n{text}\n\n{plan}")
    heading = "The largest batch within 24 GiB, GPT of 350M parameters, sequences of 2,048, bf16-mixed, on"
    write("memory", args.out, {"results": results}, heading, f"{text}\n\n```\n{plan}\n```" if plan else text)


if __name__ == "__main__":
    main()
