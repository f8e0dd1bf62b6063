"""Writes the tables of README.md and docs/results/README.md from the JSON files that the measurements left.

    make results      # the demo, every benchmark, and this

Tests hold that the pages are what this writes, so that no figure in them is by hand.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"

TITLES = {
    "plugin_overhead": "AccelPlugin against the same techniques by hand",
    "logger_overhead": "SpeedMemoryLogger against Lightning's ThroughputMonitor",
    "checkpointing": "Gradient checkpointing, 12-block transformer, float32",
    "same_losses": "Largest relative difference of the losses",
    "attention_cpu": "Flash attention on a CPU",
    "attention_memory": "What attention keeps for its backward pass",
}
REMARKS = {
    "plugin_overhead": "Asked for: at most 1% of a 50 ms step.",
    "logger_overhead": "Asked for: under 40 µs a step, and below ThroughputMonitor.",
    "checkpointing": "Asked for: `full` at least 60% lower; `selective` at least 30% lower for at most half of the"
    " extra time. The second holds at this width of 512; at 256 (`WIDTH` in the script), where attention's softmax is a"
    " larger part of a block, `selective` took more than half. The timings with dropout are not to be trusted: the"
    " plain side, slower there than `selective`, met a busy machine.",
    "same_losses": "Asked for: 1e-5. Where two runs sum in another order, training itself drives them apart; the last"
    " rows of a model show how fast, with nothing of ours involved.",
    "attention_cpu": '`auto` is `accelerate(module, Plan(flash_attention="auto"))` past its trial, `handle.step()`'
    " included; in parentheses what it took. Ratios and differences are medians of paired rounds, a percentage the time"
    " beyond the other side's: below zero is faster. Eight heads of 64 by hand, four in the modules. Each first step"
    " runs in a process of its own.",
    "attention_memory": "Asked for: linear in the length, twice for twice the tokens. Every storage that autograd"
    " keeps, counted once, parameters and buffers left out; one sample, one head of 16, float32.",
}
PLOTS = {
    "attention_memory": "Bytes kept for the backward pass against the length, plain and fused, both axes logarithmic"
}


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def demo_table() -> str:
    """The table of `make demo`, as in README.md."""
    demo = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))
    rows = []
    for name, runs in demo["runs"].items():
        plain, fast = runs["plain"], runs["accelerated"]

        def ratio(field: str, plain: dict[str, Any] = plain, fast: dict[str, Any] = fast) -> str:
            return f"**{fast[field] / plain[field]:.2f}x**"

        model = {"digits": "residual CNN, digits at 64x64", "bytes_gpt": "GPT on bytes, 3.3M parameters"}[name]
        for title, field, digits in (
            ("samples/s", "samples_per_sec", 0),
            ("step p50, ms", "step_ms_p50", 0),
            ("peak memory, MiB", "peak_memory_mib", 0),
        ):
            values = (f"{plain[field]:.{digits}f}", f"{fast[field]:.{digits}f}")
            rows.append([model, title, *values, ratio(field)])
        change = f"{fast['final_loss'] / plain['final_loss'] - 1:+.1%}"
        rows.append([model, "validation loss", f"{plain['final_loss']:.3f}", f"{fast['final_loss']:.3f}", change])
        if plain["final_accuracy"] is not None:
            accuracies = [plain["final_accuracy"], fast["final_accuracy"]]
            change = f"{100 * (accuracies[1] - accuracies[0]):+.1f} points"
            rows.append([model, "accuracy", *(f"{accuracy:.1%}" for accuracy in accuracies), change])
    where = f"{demo['device']}, {demo['threads']} threads, torch {demo['torch']}"
    table = markdown(["model", "", "plain", "`AccelPlugin()`", ""], rows)
    return (
        f"{table}\n\n`make demo` on {where}: the same weights and batches, every run in a process of its own."
        " The GPT trains without dropout; with it the ratio is lower, since both sides wait for masks"
        " that torch draws slowly on a CPU."
    )


def readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = rf"\1\n{demo_table()}\n\2"
    return re.sub(r"(<!-- demo:begin[^\n]*-->).*?(<!-- demo:end -->)", block, text, flags=re.DOTALL)


def results_page() -> str:
    parts = [
        "# Measured\n",
        "Made by `python benchmarks/render.py` from the JSON files beside it; the command over each table measures it"
        " again. Times are medians, on a shared machine: trust the ratios. The sides of a benchmark take turns, step by"
        " step or fit by fit; the demo's four runs follow each other.\n",
    ]
    parts += [f"## The demo\n\n`python examples/demo.py --json docs/results/demo.json`\n\n{demo_table()}\n"]
    for name, title in TITLES.items():
        record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        machine = record["machine"]
        where = f"{machine['device']}, {machine['cores']} cores, torch {machine['torch']}"
        table = markdown(record["columns"], record["rows"])
        command = f"`{record['command']} --json docs/results`"
        plot = f"\n![{PLOTS[name]}]({name}.svg)\n" if name in PLOTS else ""
        parts.append(f"## {title}\n\n{command} on {where}. {REMARKS[name]}\n\n{table}\n{plot}")
    parts.append(gpu_section())
    return "\n".join(parts)


def gpu_section() -> str:
    """The tables that `make gpu` wrote, for every card: the models first, then attention."""
    pages = sorted(RESULTS.glob("gpu-*.md"), key=lambda page: (page.name.startswith("gpu-attention-"), page.name))
    if not pages:
        return (
            "## On a GPU\n\n`make gpu PYTHON=python3`\n\nNot yet measured: no GPU was at hand. These rows wait for one:"
            " the two models plain, with Lightning's `bf16-mixed` and with `AccelPlugin()` (samples/s, step p50, peak"
            " memory, MFU, loss), attention by hand against every kernel there is, over 512 to 16,384 tokens, and the"
            " tests marked `gpu`.\n"
        )
    return "## On a GPU\n\n`make gpu PYTHON=python3`\n\n" + "\n".join(p.read_text(encoding="utf-8") for p in pages)


def attention_memory_svg() -> str:
    """The plot of `attention_memory.json`: the same text from the same figures, with whatever is installed."""
    details = json.loads((RESULTS / "attention_memory.json").read_text(encoding="utf-8"))["details"]
    lengths, kept = details["lengths"], details["saved_bytes"]["causal mask"]
    points = {
        name: [(n, size / 2**20) for n, size in zip(lengths, kept[name], strict=True) if size is not None]
        for name in ("plain", "fused")
    }
    sizes = [size for line in points.values() for _, size in line]
    decades = range(math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes))) + 1)
    left, top, width, height = 76, 52, 464, 292

    def x(n: float) -> str:
        return f"{left + width * math.log2(n / lengths[0]) / math.log2(lengths[-1] / lengths[0]):.1f}"

    def y(size: float) -> str:
        return f"{top + height * (decades[-1] - math.log10(size)) / (decades[-1] - decades[0]):.1f}"

    def text(at_x: float | str, at_y: float | str, words: str, more: str = "") -> str:
        return f'<text x="{at_x}" y="{at_y}"{more}>{words}</text>'

    bottom, right = top + height, left + width
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 400" font-family="sans-serif" font-size="12"'
        ' fill="#444">',
        '<rect width="680" height="400" fill="#fff"/>',
        text(
            left, 28, "Kept for the backward pass by hand-written causal attention, MiB", ' font-size="14" fill="#111"'
        ),
    ]
    for decade in decades:
        at = y(10.0**decade)
        label = f"{10**decade:,}" if decade >= 0 else f"{10.0**decade:g}"
        out.append(f'<path d="M{left} {at}H{right}" stroke="#ddd"/>')
        out.append(text(left - 8, at, label, ' text-anchor="end" dominant-baseline="middle"'))
    for n in lengths:
        out.append(f'<path d="M{x(n)} {bottom}v5" stroke="#888"/>')
        out.append(text(x(n), bottom + 20, f"{n:,}", ' text-anchor="middle"'))
    out.append(f'<path d="M{left} {bottom}H{right}" stroke="#888"/>')
    out.append(text(left + width / 2, bottom + 42, "tokens", ' text-anchor="middle"'))
    for (name, line), color in zip(points.items(), ("#c0392b", "#1f6fb2"), strict=True):
        path = " ".join(f"{x(n)},{y(size)}" for n, size in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        out += [f'<circle cx="{x(n)}" cy="{y(size)}" r="3.5" fill="{color}"/>' for n, size in line]
        end_x, end_y = float(x(line[-1][0])), y(line[-1][1])
        label = f' fill="{color}" font-weight="bold" dominant-baseline="middle"'
        last = line[-1][1]
        out.append(text(f"{end_x + 10:.1f}", end_y, f"{name}, {last:,.{0 if last >= 10 else 1}f} MiB", label))
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    (RESULTS / "attention_memory.svg").write_text(attention_memory_svg(), encoding="utf-8")
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
    (RESULTS / "README.md").write_text(results_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
