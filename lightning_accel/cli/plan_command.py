"""``lightning-accel plan``: the memory that a training run needs on each device, without a model. Needs no torch."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import Annotated, get_args

from lightning_accel.cli.command import console
from lightning_accel.core.byte_size import parse_bytes
from lightning_accel.memory.by_strategy import (
    Attention,
    Batch,
    Checkpointing,
    DecoderRun,
    DeviceMemory,
    Optimizer,
    Precision,
    Strategy,
    decoder_of,
    least_devices,
    memory_per_device,
)

# The formula leaves out the CUDA context, NCCL's buffers and the allocator's gaps.
USABLE = 0.9
_HEAD_DIM = 128
_PER_MACHINE = 8
_COUNT = re.compile(r"([+-]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([kmbt]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


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


def memory_bytes(text: str) -> int:
    """Parses an amount of memory. Returns bytes.

    Raises:
        argparse.ArgumentTypeError: The text is no amount, or not positive.
    """
    try:
        return int(parse_bytes("memory", int(text) if text.isdecimal() and len(text) > 6 else text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def plan(
    *,
    params: Annotated[int, {"type": count}],
    gpus: Annotated[int, {"type": count}],
    memory: Annotated[int | None, {"type": memory_bytes}] = None,
    precision: Precision = "bf16-mixed",
    optimizer: Optimizer = "adamw",
    layers: Annotated[int | None, {"type": count}] = None,
    width: Annotated[int | None, {"type": count}] = None,
    vocab: Annotated[int | None, {"type": count}] = None,
    tied_embeddings: bool = False,
    seq_len: Annotated[int | None, {"type": count}] = None,
    batch_size: Annotated[int | None, {"type": count}] = None,
    checkpointing: Checkpointing = "off",
    attention: Attention = "fused",
    heads: Annotated[int | None, {"type": count}] = None,
) -> int:
    """Memory per device by strategy, of a decoder that is trained with parameters in float32.

    What is not given of its shape is guessed from the models of the GPT-3 family. docs/planning.md has the formula.

    Args:
        params: parameters of the model: 7e9, 7B, 350M
        gpus: devices, over all machines
        memory: of one device, such as 80GiB: to say what fits
        precision: default: bf16-mixed
        optimizer: default: adamw
        layers: repeated blocks; guessed from --params
        width: of the vectors between them (hidden size); guessed from --params and --layers
        vocab: words; without it embedding and output layer do not count by themselves
        tied_embeddings: embedding and output layer have one weight
        seq_len: tokens in a sequence; without it activations are not counted
        batch_size: sequences a device and step (default: 1)
        checkpointing: default: off
        attention: default: fused; plain keeps its scores
        heads: of plain attention (default: one for 128 of the width)

    Raises:
        ValueError: The shape of the model is contradictory, or an argument needs another one.
    """
    decoder = decoder_of(params, layers=layers, width=width, vocab=vocab or 0, tied_embeddings=tied_embeddings)
    if seq_len is None and batch_size is not None:
        raise ValueError(f"--batch-size {batch_size} needs --seq-len: activations are counted by tokens.")
    if heads is not None and attention != "plain":
        raise ValueError(f"--heads {heads} needs --attention plain: a fused kernel keeps nothing by heads.")
    if tied_embeddings and vocab is None:
        raise ValueError("--tied-embeddings needs --vocab: the size of the weight that is shared.")
    batch = None
    if seq_len is not None:
        heads = heads or max(1, round(decoder.width / _HEAD_DIM))
        batch = Batch(seq_len=seq_len, batch_size=batch_size or 1, heads=heads, attention=attention)
    run = DecoderRun(
        decoder=decoder, batch=batch, precision=precision, optimizer=optimizer, checkpointing=checkpointing
    )
    guessed = [name for name, given in (("layers", layers), ("width", width)) if given is None]
    _show(run, gpus, memory, guessed)
    return 0


def _show(run: DecoderRun, devices: int, memory: int | None, guessed: list[str]) -> None:
    """Prints a table of the strategies, and a Trainer to copy."""
    from rich.table import Table

    strategies: tuple[Strategy, ...] = ("accel",) if devices == 1 else get_args(Strategy)
    plans = {strategy: memory_per_device(strategy, run, devices) for strategy in strategies}
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
    if memory is not None:
        title = f"fits into {USABLE:.0%} of {memory / 2**power:,.1f}"
        table.add_row(title, *("yes" if plan.peak_bytes <= USABLE * memory else "no" for plan in plans.values()))
    printed = console(120)
    printed.print(*_about(run, devices, guessed), sep="\n", soft_wrap=True, highlight=False, markup=False)
    printed.print(table)
    printed.print(*_advice(plans, run, devices, memory), sep="\n", soft_wrap=True, highlight=False, markup=False)


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


def _about(run: DecoderRun, devices: int, guessed: list[str]) -> list[str]:
    decoder = run.decoder
    vocab = f", {decoder.vocab:,} words" if decoder.vocab else ""
    lines = [
        f"{decoder.params:,} parameters in {decoder.layers} layers of width {decoder.width:,}{vocab}"
        + (f" ({' and '.join(guessed)} guessed)" if guessed else "")
        + f", {run.precision}, {devices} {'device' if devices == 1 else 'devices'}"
    ]
    if run.batch is None:
        lines.append("Activations are not counted: give --seq-len, --batch-size and --vocab.")
    elif not decoder.vocab:
        lines.append("The loss is not counted, nor embedding and output layer by themselves: give --vocab.")
    return lines


def _advice(plans: dict[Strategy, DeviceMemory], run: DecoderRun, devices: int, memory: int | None) -> list[str]:
    """Returns the Trainer to write, or what must change."""
    if memory is None:
        return [_trainer(list(plans)[-1], run, devices), "Give --memory 80GiB, or what there is, to see what fits."]
    usable = int(USABLE * memory)
    # DDP comes before FSDP because it communicates less.
    candidates = [strategy for strategy in plans if strategy != "accel" or devices == 1]
    fitting = next((strategy for strategy in candidates if plans[strategy].peak_bytes <= usable), None)
    lines = [] if fitting is None else [_trainer(fitting, run, devices)]
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
