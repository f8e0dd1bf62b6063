"""``lightning-accel plan``: the memory that a training run needs on each device, without a model. Needs no torch."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import Any, get_args

from lightning_accel.core.byte_size import parse_bytes
from lightning_accel.memory.by_strategy import DeviceMemory, Strategy, least_devices, memory_per_device
from lightning_accel.memory.decoder import Attention, Batch, Checkpointing, DecoderRun, Optimizer, Precision, decoder_of

# The formula leaves out the CUDA context, NCCL's buffers and the allocator's gaps.
USABLE = 0.9
_HEAD_DIM = 128
_PER_MACHINE = 8
_COUNT = re.compile(r"([+-]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([kmbt]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def add_parser(subcommands: Any) -> None:
    """Adds ``plan`` to the subcommands of an ``argparse`` parser."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "plan",
        help="memory per device by strategy, for a model of some size",
        description="Memory per device by strategy, of a decoder that is trained with parameters in float32. What is"
        " not given of its shape is guessed from the models of the GPT-3 family. docs/planning.md has the formula.",
    )
    add = parser.add_argument
    add("--params", type=count, required=True, help="parameters of the model: 7e9, 7B, 350M")
    add("--gpus", type=count, required=True, help="devices, over all machines")
    add("--memory", type=memory, help="of one device, such as 80GiB: to say what fits")
    add("--precision", choices=get_args(Precision), default="bf16-mixed", help="default: %(default)s")
    add("--optimizer", choices=get_args(Optimizer), default="adamw", help="default: %(default)s")
    add("--layers", type=count, help="repeated blocks; guessed from --params")
    add("--width", type=count, help="of the vectors between them (hidden size); guessed from --params and --layers")
    add("--vocab", type=count, help="words; without it embedding and output layer do not count by themselves")
    add("--tied-embeddings", action="store_true", help="embedding and output layer have one weight")
    add("--seq-len", type=count, help="tokens in a sequence; without it activations are not counted")
    add("--batch-size", type=count, help="sequences a device and step (default: 1)")
    add("--checkpointing", choices=get_args(Checkpointing), default="off", help="default: %(default)s")
    add(
        "--attention", choices=get_args(Attention), default="fused", help="default: %(default)s; plain keeps its scores"
    )
    add("--heads", type=count, help=f"of plain attention (default: one for {_HEAD_DIM} of the width)")
    parser.set_defaults(handler=show)


def with_values(arguments: Sequence[str]) -> list[str]:
    """Returns ``--params -7B`` as ``--params=-7B``: argparse takes -7B for an option, so --params has no value."""
    found: list[str] = []
    for text in arguments:
        if re.match(r"-[\d.]", text) and found and found[-1].startswith("--"):
            found[-1] += f"={text}"
        else:
            found.append(text)
    return found


def count(text: str) -> int:
    """Parses a whole number: ``8``, ``7e9``, ``7B``, ``350M``.

    Raises:
        argparse.ArgumentTypeError: The text is no whole number, or not positive.
    """
    match = _COUNT.fullmatch(text.strip())
    number = float(re.sub("[_,]", "", match[1])) * _FACTORS[match[2].lower()] if match else math.nan
    if not (math.isfinite(number) and number >= 1 and round(number, 3) == round(number)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not possible. Allowed: whole numbers from 1 on, such as 8, 7e9, 7B or 350M."
        )
    return round(number)


def memory(text: str) -> int:
    """Parses an amount of memory. Returns bytes.

    Raises:
        argparse.ArgumentTypeError: The text is no amount, or not positive.
    """
    try:
        return int(parse_bytes("memory", int(text) if text.isdecimal() and len(text) > 6 else text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def show(arguments: argparse.Namespace) -> int:
    """Prints a table of the strategies, and a Trainer to copy. Returns the exit status.

    Raises:
        ValueError: The shape of the model is contradictory, or an argument needs another one.
    """
    from rich.console import Console
    from rich.table import Table

    run, devices = _run_of(arguments), arguments.gpus
    strategies: tuple[Strategy, ...] = ("accel",) if devices == 1 else get_args(Strategy)
    plans = {strategy: memory_per_device(strategy, run, devices) for strategy in strategies}
    console = Console()
    # Lines are meant to be copied, so output to a pipe is not wrapped.
    console = console if console.is_terminal else Console(width=120)
    largest = max(plan.peak_bytes for plan in plans.values())
    unit, power = ("GiB", 30) if largest >= 2**30 else ("MiB", 20)
    table = Table(f"per device, {unit}", *(f"{name}, {1 if name == 'accel' else devices}" for name in plans))
    for column in table.columns[1:]:
        column.justify = "right"
    for title, sizes in _rows(list(plans.values()), run).items():
        table.add_row(title, *(f"{size / 2**power:,.1f}" for size in sizes))
    table.add_section()
    table.add_row("peak", *(f"{plan.peak_bytes / 2**power:,.1f}" for plan in plans.values()))
    table.add_row("when", *(plan.fullest.name for plan in plans.values()))
    if arguments.memory is not None:
        usable = USABLE * arguments.memory
        title = f"fits into {USABLE:.0%} of {arguments.memory / 2**power:,.1f}"
        table.add_row(title, *("yes" if plan.peak_bytes <= usable else "no" for plan in plans.values()))
    console.print(*_about(run, arguments), sep="\n", soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print(*_advice(plans, run, arguments), sep="\n", soft_wrap=True, highlight=False, markup=False)
    return 0


def _run_of(given: argparse.Namespace) -> DecoderRun:
    decoder = decoder_of(
        given.params,
        layers=given.layers,
        width=given.width,
        vocab=given.vocab or 0,
        tied_embeddings=given.tied_embeddings,
    )
    if given.seq_len is None and given.batch_size is not None:
        raise ValueError(f"--batch-size {given.batch_size} needs --seq-len: activations are counted by tokens.")
    if given.heads is not None and given.attention != "plain":
        raise ValueError(f"--heads {given.heads} needs --attention plain: a fused kernel keeps nothing by heads.")
    if given.tied_embeddings and given.vocab is None:
        raise ValueError("--tied-embeddings needs --vocab: the size of the weight that is shared.")
    batch = None
    if given.seq_len is not None:
        heads = given.heads or max(1, round(decoder.width / _HEAD_DIM))
        batch = Batch(seq_len=given.seq_len, batch_size=given.batch_size or 1, heads=heads, attention=given.attention)
    return DecoderRun(
        decoder=decoder,
        batch=batch,
        precision=given.precision,
        optimizer=given.optimizer,
        checkpointing=given.checkpointing,
    )


def _rows(plans: list[DeviceMemory], run: DecoderRun) -> dict[str, list[int]]:
    rows = {
        "parameters": [plan.parameters_bytes for plan in plans],
        "gradients": [plan.gradients_bytes for plan in plans],
        f"optimizer states ({run.optimizer})": [plan.optimizer_bytes for plan in plans],
        "at the peak: copies, gathered, on the way": [plan.fullest.weights_bytes for plan in plans],
    }
    if run.batch is not None:
        title = f"at the peak: activations (checkpointing {run.checkpointing})"
        rows[title] = [plan.fullest.activations_bytes for plan in plans]
    return rows


def _about(run: DecoderRun, given: argparse.Namespace) -> list[str]:
    decoder = run.decoder
    guessed = [name for name in ("layers", "width") if getattr(given, name) is None]
    vocab = f", {decoder.vocab:,} words" if decoder.vocab else ""
    lines = [
        f"{decoder.params:,} parameters in {decoder.layers} layers of width {decoder.width:,}{vocab}"
        + (f" ({' and '.join(guessed)} guessed)" if guessed else "")
        + f", {run.precision}, {given.gpus} {'device' if given.gpus == 1 else 'devices'}"
    ]
    if run.batch is None:
        lines.append("Activations are not counted: give --seq-len, --batch-size and --vocab.")
    elif not decoder.vocab:
        lines.append("The loss is not counted, nor embedding and output layer by themselves: give --vocab.")
    return lines


def _advice(plans: dict[Strategy, DeviceMemory], run: DecoderRun, given: argparse.Namespace) -> list[str]:
    """Returns the Trainer to write, or what must change."""
    if given.memory is None:
        return [_trainer(list(plans)[-1], run, given.gpus), "Give --memory 80GiB, or what there is, to see what fits."]
    usable = int(USABLE * given.memory)
    # DDP comes before FSDP because it communicates less.
    candidates = [strategy for strategy in plans if strategy != "accel" or given.gpus == 1]
    fitting = next((strategy for strategy in candidates if plans[strategy].peak_bytes <= usable), None)
    lines = [] if fitting is None else [_trainer(fitting, run, given.gpus)]
    if fitting in ("accel", "accel_ddp"):
        return lines
    least = least_devices("accel_fsdp", run, usable)
    if least is not None:
        return [*lines, f"accel_fsdp fits from {least} such {'device' if least == 1 else 'devices'} on."]
    smaller = "" if run.batch is None else "a smaller batch, " if run.batch.batch_size > 1 else "shorter sequences, "
    recomputed = "" if run.batch is None or run.checkpointing == "full" else "--checkpointing full, "
    return [f"No number of such devices is enough. What helps: {smaller}{recomputed}devices with more memory."]


def _trainer(strategy: Strategy, run: DecoderRun, devices: int) -> str:
    where = f"devices={devices}"
    if devices > _PER_MACHINE and devices % _PER_MACHINE == 0:
        where = f"devices={_PER_MACHINE}, num_nodes={devices // _PER_MACHINE}"
    settings = f'precision="{run.precision}"'
    if run.checkpointing != "off":
        settings += f', memory={{"checkpoint": "{run.checkpointing}"}}'
    return f'Trainer(strategy="{strategy}", {where}, plugins=[AccelPlugin({settings})])'
