"""What hand-written attention keeps for its backward pass against the length, plain and fused.

    python benchmarks/attention_memory.py [--longest 16384] [--json docs/results]

Bytes are counted at autograd's own hooks, every storage once, parameters and buffers left out: they are there anyway.
One sample, one head of 16, float32. The fused side is one module under
``Plan(techniques={"flash_attention": "sdpa"})``, tried at the shortest length and then given every other.
``benchmarks/render.py`` draws the JSON as ``attention_memory.svg``.

To answer: the fused side grows with the length, not with its square; a causal mask costs it nothing.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _measure import publish
from attention_cpu import HandWritten, attention_plan, training_pass
from torch import Tensor, nn

from lightning_accel import accelerate

HEAD_DIM, SHORTEST = 16, 256
MAX_SCORES_BYTES = 2 << 30  # longer ones are not tried plain: several tensors of that size stand beside each other


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """What one forward pass keeps for its backward pass."""
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in own)


def measure(lengths: list[int], *, causal: bool) -> dict[str, list[int | None]]:
    """Bytes by side, one for each length; None where the plain side would need too much."""
    found: dict[str, list[int | None]] = {"plain": [], "fused": []}
    for side, saved in found.items():
        torch.manual_seed(0)
        module = HandWritten(1, HEAD_DIM, lengths[-1] if causal else 0)
        if side == "fused":
            handle = accelerate(module, attention_plan("sdpa"))
            for _ in range(2):
                training_pass(module, torch.randn(1, lengths[0], HEAD_DIM, requires_grad=True), handle.step)
            assert handle.report.applied("flash_attention"), handle.report.to_text()
        for length in lengths:
            if side == "plain" and 4 * length**2 > MAX_SCORES_BYTES:
                saved.append(None)
            else:
                saved.append(saved_bytes(module, torch.randn(1, length, HEAD_DIM, requires_grad=True)))
    torch._dynamo.reset()
    return found


def mib(value: int | None) -> str:
    return "not tried" if value is None else f"{value / 2**20:,.3f}"


def growth(values: list[int | None], index: int) -> str:
    """The value as a multiple of the one before it, at half the length."""
    now, before = values[index], values[index - 1] if index else None
    return "" if now is None or before is None else f"{now / before:.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=16384)
    longest: int = parser.parse_known_args()[0].longest
    lengths = [SHORTEST]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    free, causal = measure(lengths, causal=False), measure(lengths, causal=True)
    rows = []
    for index, length in enumerate(lengths):
        row: list[Any] = [f"{length:,}"]
        for side in ("plain", "fused"):
            row += [mib(free[side][index]), growth(free[side], index), mib(causal[side][index])]
        rows.append(row)
    publish(
        "attention_memory",
        "python benchmarks/attention_memory.py",
        [
            "tokens",
            *("plain, MiB", "for twice the tokens", "plain, causal mask, MiB"),
            *("fused, MiB", "for twice the tokens", "fused, causal mask, MiB"),
        ],
        rows,
        {"lengths": lengths, "saved_bytes": {"no mask": free, "causal mask": causal}},
    )


if __name__ == "__main__":
    main()
