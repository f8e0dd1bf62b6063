"""Writes the tables of README.md and docs from the JSON files that the measurements left.

    make results      # the demo, every benchmark, and this

Tests hold that the pages are what this writes, so that no figure in them is by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import _technique_pages
from _plots import attention_memory_svg, device_pipeline_svg, memory_modes_svg
from _rivals_tables import ASKS_COLUMNS, asks
from _technique_pages import filled, markdown, where

from lightning_accel.claims.machine import title

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"

TITLES = {
    "never_slower": "Small models of seven kinds, plain and with `AccelPlugin()`",
    "short_runs": "Short fits, of small models, from the first step to the last",
    "tuning": "Live trials, an exhaustive search and a greedy one",
    "false_wins": "Searches where there is nothing to find",
    "techniques": "What each technique adds to a step",
    "second_run": "A second run of the same training",
    "downstream": "Libraries that are built on Lightning, plain and with `AccelPlugin()`",
    "rivals": "`AccelPlugin()` beside other tools",
    "plugin_overhead": "What standing by costs",
    "deploying": "Models in the forms in which they are served",
    "deploying_int8": "INT8 on a CPU, by all its kernels",
    "diagnosis": "Eight planted faults",
    "evidence_cost": "What measuring a run costs it",
    "evidence_sums": "Whether what was measured adds up",
    "checkpointing": "Gradient checkpointing, 12-block transformer, float32",
    "same_losses": "Largest relative difference of the losses",
    "attention_cpu": "Flash attention on a CPU",
    "attention_memory": "What attention keeps for its backward pass",
    "linear_cross_entropy": "A linear head and its cross-entropy, in pieces",
    "optimizer_steps": "A step of torch's optimizers, one by one, by foreach and fused",
    "allocator": "What allocating memory costs a step on a CPU",
    "memory_modes": "What every way to save memory costs",
    "memory_budget": "Memory budgets, planned and kept",
    "memory_budget_exhaustive": "The planner against every choice, ten equal blocks",
    "budget_solvers": "Who plans a budget: the planner, or `scipy.optimize.milp`",
    "packing": "Packing of saved tensors on one core",
    "packing_steps": "Packing in a training step",
    "preprocessing": "Crop, flip, normalise, channels_last: uint8 256x3x224x224 on one core",
    "transform_libraries": "Transforms beside torchvision's and Kornia's",
    "device_pipeline": "Preprocessing while the step before computes",
    "sharding_memory": "Memory by strategy, reckoned and measured",
    "strategies": "Two CPU processes under `accel_ddp` and under Lightning's own",
    "xla": "What XLA compiles and records",
}
REMARKS = {
    "never_slower": "Asked for: nowhere slower, nowhere more than 3% more memory. Both sides take turns, and neither"
    " measures itself by more than a clock; what is logged by default counts. Both have this package imported, which is"
    " a few MiB more than a program without it has. A speed whose rounds lie on both sides of 1 shows no difference."
    " *Held after a step* is what the allocator keeps: less than the peak where glibc gives memory back after every"
    " step, and faults it in again.",
    "short_runs": "Asked for: at least 0.98x everywhere, and a single step within 0.15 s of plain. The whole of"
    " `Trainer.fit`, trials and logging included, in wall time and in processor time (*CPU*); the worst stands last."
    " *Fresh*: nothing is known of the training. *Again*: the second fit in a process, beside plain's second. *In a new"
    " process*: with what the first has left in the cache folder. *At most later*: the worst of the three. Ratios are"
    " medians over rounds, in each of which plain and the others take turns in random order; every process has run two"
    " plain steps before.",
    "tuning": "Asked for: at least 97% of the best; never below 0.99x of plain, tuning included; two runs agree on"
    " what is worth more than 5%. Two plain loops train a model in turns, a step each, from the first step to the"
    " last, in one process and on one heap. One has live trials, the other has no lightning-accel. *Plain by tuned"
    " time* is the ratio of the sums, trials included, with its 95% interval; a slow moment of the machine is in it,"
    " and not in the *median of pairs*. *Its share of the best*: throughput to that of the best combination of the"
    " same arms, in turns of their own, after the search for it. *A second run* trains alone. If it differs on an"
    " arm, the percentage is what that arm is worth. *Greedy search* is the protocol of pytorch-autotune 2.0, written"
    " anew, on the same arms: medians of 8 steps, and a floor of 3%. Where a machine has bfloat16, that is an arm of"
    " its own, and each model is measured without it, too. Where the steps are fewer than asked for, there was no"
    " time for more.",
    "false_wins": "Asked for: at most 1 in 100. Arms that change nothing at all, in short plain loops whose steps take"
    " milliseconds; the same greedy search as above.",
    "techniques": "*Alone*: plain's time over that of the step with this technique and nothing else. *Left out of the"
    " whole*: the time of the whole without it over that of the whole. The whole is all that a run has from its first"
    " step on, whether they gain or not. Above 1 it gains, with 95% intervals. Fewer threads, a heap that keeps what"
    " is freed and compiled blocks are measured on top of the whole, and the others without them. If compiling would"
    " have cost too much of the measurement, the table says so.",
    "second_run": "Asked for: at most 1.1 for the second, compile included. The figure is the mean of the first 50"
    " steps by the median of the first run's last 25, when it has settled. Beside it is the same by the run's own"
    " last 25, which a run that had returned to plain would pass. A step runs from a batch's start to the next one's,"
    " so that trials and compilation are in it. *In the first 50*: the seconds that they took beyond as many settled"
    " ones, for tracing, kernels from the cache and trials. *Plain* is a run without the plugin, whose first steps"
    " are slow, too. *Imports* and *to the first step* come before it. Each run is a process of its own. `auto` is"
    " told of 20,000 steps, has compilation alone on trial, and is ended early.",
    "downstream": "Asked for: at least 0.98x in each. Short fits of other people's models, on drawn data. *Speed* is"
    " plain's time by that with the plugin, of the clock. *CPU* is the same of all threads' processor time. Both are"
    " medians over rounds, in which the sides' processes take turns of 50 ms, on one thread. What comes before a"
    " fit's first step is not taken in turns: fits of 5 steps tell little. *Fresh* has an empty cache folder,"
    " *second* is the next fit in the same process, and *new process* finds what an earlier process has left there. A"
    " fit is the library's own call, with its Trainer and what it prepares. darts tells the Trainer its precision,"
    ' 32-true, and has the plugin by `strategy="accel"`.',
    "rivals": "Asked for: at least 0.97x of the best other side over 1,000 steps, in every model. The sides have the"
    " same weights, batches and optimizer. Each run is a process of its own that finds nothing in any cache; on a CPU,"
    " the processes take turns. Setting up, compiling and trials are in the times; imports are not. The verdicts, and"
    " what each side is:"
    " [beside other tools](../rivals.md).",
    "plugin_overhead": "Asked for: at most 15 µs a step with everything off and 50 µs with the defaults, which log."
    " Steps are in processor time, calls forward passes of tiny tensors.",
    "deploying": "Asked for: INT8 at batch 1 at least twice as fast as eager float32, in a quarter of the size, for"
    " under one point of accuracy. Another form is to be at least 1.3 times as fast on the demo's models. The encoder"
    " has learnt scikit-learn's digits, at 32x32 in patches of 4x4, and is judged by those that it has not seen. The"
    " demo's models are untrained, as their speed is what is asked. So it is not known what bf16 and INT8 cost them"
    " in points, only by what error they are off. Other forms are off by rounding. All by `compare`: forms take"
    " turns, latencies are at batch 1, in brackets are 95% intervals, and *points lost* are over the same samples as"
    " eager's. What is **bold** is what it recommends.",
    "deploying_int8": "The encoder of the table before, at batch 1; all in one process, taking turns. *Dynamic* takes"
    " the range of inputs at every call, *static* from calibration data. Errors are of the outputs' norm.",
    "diagnosis": "Asked for: every fault found, predictions within 25% of what came of them, nothing found in healthy"
    " runs. Two runs take turns, an epoch each: one with the fault, and one in which it is mended as the finding"
    " says. *Measured* is the median of the ratios of neighbouring turns of all pairs of processes, with its 95%"
    " interval. Predictions are of the record with the median one and of what the machine does at most. Within 25% of"
    " what came is 0.80 to 1.33 in *measured by predicted*. *Predicted MiB* is what the peak should lose where memory"
    " is the fault. *Also found* is no error by itself: float32 can be worth changing in a run that has another"
    " fault, too. Asking for numbers on a CPU waits for nothing, and none of it is to be gained there. TraceML trains"
    " each fault once more and alone; *found* stands where one of its names can be read as the fault. Its findings on"
    " memory need a GPU.",
    "evidence_cost": "Asked for: under 1% of a step of 50 ms. It is measured on small steps, since what measuring adds"
    " does not hang on their length. *Plain once more* shows what a difference of nothing is here. In the first steps"
    " are the two that are taken apart; at the end loggers are told, a figure drawn and the record closed: paid once.",
    "evidence_sums": "Asked for: the parts of a step within 2% of its time, on another clock; the memory categories"
    " within 3% of the allocator's peak in the same step of a second run. What operations take and give back within"
    " themselves is one of the categories, from the meter that the step was taken apart under.",
    "checkpointing": "Asked for: `full` at least 60% lower; `selective` at least 30% lower for at most half of the"
    " extra time. The second holds at this width of 512; at 256 (`WIDTH` in the script), where attention's softmax is a"
    " larger part of a block, `selective` took more than half. The timings with dropout are not to be trusted: the"
    " plain side, slower there than `selective`, met a busy machine.",
    "same_losses": "Asked for: 1e-5. Where two runs sum in another order, training itself drives them apart; the last"
    " rows of a model show how fast, with nothing of ours involved.",
    "attention_cpu": '`auto` is `accelerate(module, Plan(techniques={"flash_attention": "auto"}))` past its trial,'
    " `handle.step()` included; in parentheses what it took. Ratios and differences are medians of paired rounds, a"
    " percentage the time beyond the other side's: below zero is faster. Eight heads of 64 by hand,"
    " four in the modules. Each first step"
    " runs in a process of its own.",
    "linear_cross_entropy": "Asked for: at most a tenth of plain's logits, at most 1.05x its time, 1e-12 in float64."
    " Memory is the peak of forward and backward beyond the gradients of input and weight, which both sides return."
    " *Error* is from plain in float64, beside plain's own. *Torch's* is `F.linear_cross_entropy`, with its own"
    " choice of pieces, and told to take as many rows at once as we do. All sides take turns, in so many *rounds* after"
    " one that warms up.",
    "optimizer_steps": "Ratios are to the step parameter by parameter, which is what torch does by itself on a CPU; on"
    ' a GPU it takes foreach by itself. *By the technique* is `techniques.optimizer="fused"`, which looks at every'
    " parameter before a fused step.",
    "allocator": "*In the run* is what `techniques.allocator='auto'` does: glibc's heap is told to keep what is free,"
    " once the loop is warm. Others are chosen by variables before Python starts, as `lightning-accel run` sets them."
    " Speeds are medians over rounds of plain's step by theirs; processes take turns.",
    "memory_modes": "float32, the same weights and batch. `disk` is `activation_offloading` to a memory-mapped file,"
    " `sparse` is `sparse_activations`; a `budget` is a share of the plain activations, and may use the disk. Points on"
    " the dashed line are beaten by no other in both.",
    "memory_budget": "Asked for: at most 5% under the budget, never over it, at 80, 60, 40 and 25% of the plain"
    " activations. The U-Net's 25% cannot be had on this CPU: the convolutions at full resolution need most of that"
    " for their own backward pass, whatever blocks keep. The least that can be had stands beside it. float32.",
    "memory_budget_exhaustive": "Asked for: at most 5% slower than the best of all choices that fit. Equal blocks may"
    " change places, so that numbers of them are all there is to choose; no disk.",
    "budget_solvers": "Both find the fastest policies within a budget, so far of the way from the least that fits to"
    " what nothing recomputed needs. The last column is how much longer a step takes by the planner's policies.",
    "packing": "Asked for: at least 3x fewer bytes at 10% density, at 1 GB/s or more of unpacked bytes. One thread.",
    "packing_steps": "`auto` gives packing at most a tenth of the step's time, as its codecs measure themselves; what"
    " the allocator takes for memory that comes and goes is on top. One thread.",
    "attention_memory": "Asked for: linear in the length, twice for twice the tokens. Every storage that autograd"
    " keeps, counted once, parameters and buffers left out; one sample, one head of 16, float32.",
    "preprocessing": "Asked for: at least 2x, at most a third of the peak. *Separate* normalises in place; its peak in"
    " float32 is two and a half results, so that a third is out of reach there for anything that returns one. What"
    " Numba gains is not worth the dependency to a thread that waits for the step: NumPy it is.",
    "transform_libraries": "64 images 3x64x64, one core. Torchvision draws once for all that it is given, so that it is"
    " given one image after another; Kornia draws for each, and takes no uint8. A ratio above 1 is slower than ours.",
    "device_pipeline": "Asked for: preprocessing that takes 60% of a step costs less than 10% of the throughput, on two"
    " cores with one thread each. *Inline* is the same preprocessing at the transfer of each batch.",
    "sharding_memory": "Asked for: what four processes of `accel_fsdp` hold each is at most 35% of what one holds. Held"
    " are parameters, gradients and optimizer states after a step; the peak is of tensors alive within one.",
    "strategies": "Asked for: at least as fast. The same plugin on both sides, one thread a process, float32.",
    "xla": "A transformer layer on 24 batches of text of twelve lengths, one epoch on XLA's CPU device, each row in a"
    " process of its own, once. *Tensors recorded* are those that XLA is told of in the last step, the optimizer's"
    " among them.",
}
TUNING_COLUMNS = ("", "steps", "settled", "steps to settle", "its share of the best", "plain by tuned time")
DEMO_MODELS = {
    "digits": "residual CNN, digits at 40x40, 32 a step",
    "bytes_gpt": "GPT of two blocks on bytes, 4 x 512 tokens a step",
}
PLOTS = {
    "attention_memory": (
        attention_memory_svg,
        "Bytes kept for the backward pass against the length, plain and fused, both axes logarithmic",
    ),
    "memory_modes": (
        memory_modes_svg,
        "Step time against peak of the activations for every way to save memory, on the demo's two models",
    ),
    "device_pipeline": (
        device_pipeline_svg,
        "A trace of six training steps: preprocessing between the steps, and beside them in the pipeline's thread",
    ),
}


def demo_table() -> str:
    """The tables of `make demo`: what it says of each model, a column for each machine."""
    records = _demo_records()
    rows = []
    for name, model in DEMO_MODELS.items():
        lines = [{line["title"]: line for line in record["models"][name]["lines"]} for record in records]
        rows.append([f"**{model}**", *(f"**{record['models'][name]['verdict']}**" for record in records)])
        for kind in dict.fromkeys(kind for by_kind in lines for kind in by_kind if kind != "loss before"):
            rows.append([kind, *(_demo_cell(by_kind.get(kind)) for by_kind in lines)])
    rows.append(["measured", *(_measured(record) for record in records)])
    return (
        markdown(["", *(title(record["machine"]) for record in records)], rows)
        + "\n\nPlain → `AccelPlugin()`: the ratio, and in parentheses the least and the largest of a round. The same"
        " weights and batches on both sides, every run in a process of its own. The GPT trains without dropout; with it"
        " the ratio is lower, since both sides wait for masks that torch draws slowly on a CPU."
    )


def _demo_records() -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((RESULTS / "demo").glob("*.json"))]


def _demo_cell(line: dict[str, str] | None) -> str:
    if line is None:
        return ""
    cell = f"{line['plain']} → {line['accelerated']}"
    cell += f": **{line['ratio']}**" if line["ratio"] else ""
    return cell + (f" ({line['spread']})" if line["spread"] else "")


def _measured(record: dict[str, Any]) -> str:
    about = record["machine"]
    versions = f"lightning-accel {about['lightning_accel']}, torch {about['torch']}, {about['threads']} threads"
    return "; ".join(part for part in (f"{record['date']}, {versions}", record["note"]) if part)


def gains_table() -> str:
    """What the demo gained, a row for each machine, as README.md begins with it."""
    rows = []
    for record in _demo_records():
        row = [title(record["machine"])]
        for name in DEMO_MODELS:
            by_title = {line["title"]: line for line in record["models"][name]["lines"]}
            speed, memory = by_title["samples/s"], by_title["peak memory, MiB"]
            row += [f"**{speed['ratio']}** ({speed['spread']})", memory["ratio"]]
        rows.append(row)
    if not any(record["machine"]["kind"] == "cuda" for record in _demo_records()):
        rows.append(["NVIDIA GPUs", *["not measured yet"] * (2 * len(DEMO_MODELS))])
    return markdown(
        ["", *(f"{name}: {what}" for name in ("residual CNN", "GPT") for what in ("speed", "memory"))], rows
    )


def readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return filled(filled(text, "gains", gains_table()), "techniques", _technique_pages.short_list())


def tuning_page() -> str:
    """docs/tuning.md with the figures of its last section written anew."""
    parts = []
    for path in sorted((RESULTS / "tuning").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        places = [record["columns"].index(column) for column in TUNING_COLUMNS]
        rows = [[row[place] for place in places] for row in record["rows"]]
        parts.append(f"On {where(record['machine'])}:\n\n{markdown(TUNING_COLUMNS, rows)}")
    for path in sorted((RESULTS / "false_wins").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found = " and ".join(f"{name} found a winner in {won} of {runs}" for name, won, runs, *_ in record["rows"])
        parts.append(f"Among three arms that do nothing, {found}, on {where(record['machine'])}.")
    text = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    return filled(text, "tuning", "\n\n".join(parts))


def rivals_page() -> str:
    """docs/rivals.md with its tables written anew."""
    parts = []
    for path in sorted(RESULTS.glob("rivals*/*.json")):
        details = json.loads(path.read_text(encoding="utf-8"))["details"]
        verdicts = details["verdicts"]
        parts += [_measured_table(path).strip(), markdown(verdicts["columns"], verdicts["rows"])]
        parts += [f"Not measured: {line}." for line in details["not measured"]]
    parts += [page.read_text(encoding="utf-8").strip() for page in sorted(RESULTS.glob("gpu-rivals-*.md"))]
    text = (ROOT / "docs" / "rivals.md").read_text(encoding="utf-8")
    text = filled(text, "asks", markdown(ASKS_COLUMNS, asks()))
    return filled(text, "rivals", "\n\n".join(parts) or "Not yet measured.")


def deploying_page() -> str:
    """docs/deploying.md with the figures of its last section written anew."""
    parts = []
    for name in ("deploying", "deploying_int8"):
        tables = [_measured_table(path) for path in sorted(RESULTS.glob(f"{name}/*.json"))]
        parts += [f"{TITLES[name]}. {REMARKS[name]}", *tables] if tables else []
    text = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    return filled(text, "deploying", "\n\n".join(map(str.strip, parts)) or "Not yet measured.")


def results_page() -> str:
    parts = [
        "# Measured\n",
        "Made by `python benchmarks/render.py` from the JSON files beside it; the command over each table measures it"
        " again. Times are medians, on a shared machine: trust the ratios. The sides of a benchmark take turns, step by"
        " step, fit by fit or, in the demo, a few steps at a time.\n",
    ]
    parts += [f"## The demo\n\n`python examples/demo.py --json docs/results/demo`\n\n{demo_table()}\n"]
    for name, heading in TITLES.items():
        plot = f"\n![{PLOTS[name][1]}]({name}.svg)\n" if name in PLOTS else ""
        tables = [
            _measured_table(path) for path in (*RESULTS.glob(f"{name}.json"), *sorted(RESULTS.glob(f"{name}/*.json")))
        ]
        if tables:  # else it was not measured yet
            parts.append(f"## {heading}\n\n{REMARKS[name]}\n\n" + "\n".join(tables) + plot)
    parts.append(gpu_section())
    return "\n".join(parts)


def _measured_table(path: Path) -> str:
    record = json.loads(path.read_text(encoding="utf-8"))
    table = markdown(record["columns"], record["rows"])
    return f"`{record['command']} --json docs/results` on {where(record['machine'])}:\n\n{table}\n"


_KINDS = re.compile(
    "gpu-(attention|autotune|claims|deploying|ladder|linear-cross-entropy|memory|offloading|packing|pipeline|preprocessing"
    "|rivals|smoke|strategies|tuning)-"
)


def gpu_section() -> str:
    """The tables that `make gpu` wrote, for every card, the models first; and which are still to come."""
    found = sorted(RESULTS.glob("gpu-*.md"), key=lambda page: (_KINDS.search(page.name) is not None, page.name))
    kinds = {match.group(1) if (match := _KINDS.search(page.name)) else "" for page in found}
    scripts = sorted(path.stem for path in Path(__file__).parent.glob("gpu*.py"))
    waiting = [name for name in scripts if name.removeprefix("gpu").strip("_").replace("_", "-") not in kinds]
    parts = ["## On a GPU", "`make gpu PYTHON=python3`", *(page.read_text(encoding="utf-8").strip() for page in found)]
    if waiting:
        parts.append(f"Not measured on any GPU yet: {', '.join(f'`{name}`' for name in waiting)}.")
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """Every page with figures in it, whole."""
    return {
        ROOT / "README.md": readme(),
        ROOT / "docs" / "tuning.md": tuning_page(),
        ROOT / "docs" / "deploying.md": deploying_page(),
        ROOT / "docs" / "rivals.md": rivals_page(),
        RESULTS / "README.md": results_page(),
        **_technique_pages.pages(),
    }


def main() -> None:
    for name, (draw, _) in PLOTS.items():
        (RESULTS / f"{name}.svg").write_text(draw(), encoding="utf-8")
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
