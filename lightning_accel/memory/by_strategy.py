"""Estimates the memory of a training step on each device, by strategy, with a formula that needs no model.

The formula is for decoders: an embedding, L repeated blocks of width D and an output layer, trained with parameters in
float32, as Lightning's mixed precision keeps them. docs/planning.md has all its terms. A device always holds its share
of parameters, gradients and optimizer states. On top comes, for some time, what a :class:`Moment` counts. The peak is
the held memory plus the largest moment. With c bytes per element of the compute dtype, 4 or 2, and T tokens per device,
a block keeps (14 c + 8) T D for its backward pass.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
https://arxiv.org/abs/1910.02054, for what is sharded; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022), https://arxiv.org/abs/2205.05198, for what a block keeps, here without dropout and with the
inputs of the norms in float32.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import log, sqrt
from typing import Literal, get_args

from lightning_accel.core.checks import check_choice

Strategy = Literal["accel", "accel_ddp", "accel_fsdp"]
Precision = Literal["32-true", "16-mixed", "bf16-mixed"]
Optimizer = Literal["adamw", "adam", "sgd", "sgd-momentum"]
Checkpointing = Literal["off", "selective", "full"]
Attention = Literal["fused", "plain"]

# Parameters and blocks of the models in Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1,
# https://arxiv.org/abs/2005.14165.
_DEPTHS = {125e6: 12, 350e6: 24, 760e6: 24, 1.3e9: 24, 2.7e9: 32, 6.7e9: 32, 13e9: 40, 175e9: 96}

_STATE_BYTES: dict[Optimizer, int] = {"adamw": 8, "adam": 8, "sgd": 0, "sgd-momentum": 4}
_STEP_BYTES: dict[Optimizer, int] = {"adamw": 4, "adam": 4, "sgd": 0, "sgd-momentum": 0}
_MOST_DEVICES = 1_000_000


def memory_per_device(strategy: Strategy, run: DecoderRun, devices: int) -> DeviceMemory:
    """Returns the memory of a training step on the fullest of ``devices`` (all machines). Only ``"accel_fsdp"`` shards.

    Raises:
        ValueError: The strategy is unknown, or there is no device.
    """
    check_choice("strategy", strategy, get_args(Strategy))
    check_positive("devices", devices)
    share = -(-run.decoder.params // devices) if strategy == "accel_fsdp" else run.decoder.params
    moments = _sharded_moments(run, devices) if strategy == "accel_fsdp" else _whole_moments(run)
    return DeviceMemory(
        parameters_bytes=4 * share,
        gradients_bytes=4 * share,
        optimizer_bytes=_STATE_BYTES[run.optimizer] * share,
        moments=(*moments, Moment("optimizer's step", _STEP_BYTES[run.optimizer] * share, 0)),
    )


def least_devices(strategy: Strategy, run: DecoderRun, memory_bytes: int) -> int | None:
    """Returns the fewest devices on which a step needs at most ``memory_bytes`` each; None if no number suffices."""

    def fits(devices: int) -> bool:
        return memory_per_device(strategy, run, devices).peak_bytes <= memory_bytes

    found = bisect_left(range(1, _MOST_DEVICES + 1), True, key=fits)
    return found + 1 if found < _MOST_DEVICES else None


def _whole_moments(run: DecoderRun) -> tuple[Moment, ...]:
    """Returns the temporary memory if every device has the whole model."""
    kept = _activations(run)
    stored = kept.block_bytes * run.decoder.layers
    copies = 0 if run.compute_bytes == 4 else run.compute_bytes * run.decoder.multiplied_params
    return (
        Moment("loss", copies, stored + kept.loss_bytes),
        Moment("backward", copies + 4 * 4 * run.decoder.width**2, stored + kept.work_bytes),
    )


def _sharded_moments(run: DecoderRun, devices: int) -> tuple[Moment, ...]:
    """Returns the temporary memory if FSDP2 gathers one block after another, in the compute dtype.

    The buffer of a gathered block lives until the next block is copied out of its own buffer. Gradients of a block are
    reduced in a float32 buffer that is freed one block later. The root (embedding and output layer) stays gathered.
    """
    kept = _activations(run)
    decoder, c = run.decoder, run.compute_bytes
    root, block, output = c * decoder.root_params, c * decoder.block_params, c * decoder.output_params
    stored = kept.block_bytes * decoder.layers
    but_one, but_two = stored - kept.block_bytes, max(0, stored - 2 * kept.block_bytes)
    gathered, buffer = root + output + 2 * block, 4 * decoder.block_params
    at_last = (3 if decoder.tied_embeddings else 2) * output
    return (
        Moment("first block", 2 * root + 2 * block, 0),
        Moment("loss", root, stored + kept.loss_bytes),
        Moment("backward, last block", gathered, stored + kept.work_bytes),
        Moment("backward", gathered + buffer, but_one + kept.work_bytes),
        Moment("backward", gathered + buffer + block, but_two + kept.end_bytes),
        Moment("backward, embedding", root + at_last + buffer, 0),
        Moment("reduction of the root", root + 4 * decoder.root_params, 0),
        Moment("root reduced", 4 * decoder.root_params + 4 * -(-decoder.root_params // devices) + output, 0),
    )


def _activations(run: DecoderRun) -> _Activations:
    """Returns the memory of activations; zero if no batch is given."""
    if run.batch is None:
        return _Activations()
    batch, c = run.batch, run.compute_bytes
    values = batch.tokens * run.decoder.width
    scores = batch.scores if batch.attention == "plain" else 0
    # On a GPU autocast runs softmax in float32 and casts its result. Both are kept.
    whole = (14 * c + 8) * values + (4 if c == 4 else 4 + c) * scores
    kept = {"off": whole, "selective": (10 * c + 4) * values, "full": 4 * values}[run.checkpointing]
    # Backward through softmax, after everything behind attention has been freed.
    scores_work = 2 * c * scores - (9 * c + 4) * values
    return _Activations(
        block_bytes=kept,
        work_bytes=whole - kept + max(5 * c * values, scores_work),
        end_bytes=(6 * c + 4) * values,
        loss_bytes=12 * batch.tokens * run.decoder.vocab + (c + 4) * values,
    )


@dataclass(frozen=True)
class Moment:
    """The memory that one moment of a step needs in addition to the held memory."""

    name: str
    weights_bytes: int  # copies, gathered parameters, gradients in transit, intermediate results of the optimizer
    activations_bytes: int  # kept for the backward pass, or being computed

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.activations_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of a training step on one device."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    moments: tuple[Moment, ...]  # temporary memory, in the order of a step

    @property
    def held_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + self.fullest.total_bytes


@dataclass(frozen=True, kw_only=True)
class _Activations:
    """The memory of activations."""

    block_bytes: int = 0  # kept by every block from its forward to its backward pass
    work_bytes: int = 0  # needed in addition in its backward pass: recomputed values and gradients
    end_bytes: int = 0  # the part that remains when all the block's parameters have gradients
    loss_bytes: int = 0  # the loss, and the last norm


def decoder_of(
    params: int,
    *,
    layers: int | None = None,
    width: int | None = None,
    vocab: int = 0,
    tied_embeddings: bool = False,
) -> Decoder:
    """Returns the decoder of ``params`` parameters. Guesses the parts of its shape that are not given.

    The number of layers is that of the GPT-3 model nearest in size. The width gives the blocks 12 L D² parameters, as
    in that family.

    Raises:
        ValueError: A number is not positive, or the embedding alone has more parameters.
    """
    check_positive("params", params)
    if layers is None:
        layers = _DEPTHS[min(_DEPTHS, key=lambda size: abs(log(size / params)))]
    check_positive("layers", layers)
    if width is None:
        words = vocab if tied_embeddings else 2 * vocab
        width = max(1, round((sqrt(words**2 + 48 * layers * params) - words) / (24 * layers)))
    return Decoder(params=params, layers=layers, width=width, vocab=vocab, tied_embeddings=tied_embeddings)


def check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value} is not possible. Allowed: whole numbers from 1 on.")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The parameters of a decoder, and their distribution over its parts."""

    params: int  # in total
    layers: int  # repeated blocks
    width: int  # size of the vectors between blocks
    vocab: int = 0  # rows of the embedding and the output layer; 0 to leave both out
    tied_embeddings: bool = False  # whether both share one weight

    def __post_init__(self) -> None:
        for name in ("params", "layers", "width"):
            check_positive(name, getattr(self, name))
        if self.vocab < 0:
            raise ValueError(f"vocab={self.vocab} is not possible. Allowed: whole numbers from 1 on, 0 for none.")
        if self.params <= self.root_params:
            raise ValueError(
                f"params={self.params:,} leaves nothing for the blocks: the embedding and the output layer of"
                f" vocab={self.vocab:,} and width={self.width:,} have {self.root_params:,}. If they share one weight,"
                " give tied_embeddings; else a smaller vocab or width."
            )

    @property
    def output_params(self) -> int:
        return self.vocab * self.width

    @property
    def root_params(self) -> int:
        return self.output_params if self.tied_embeddings else 2 * self.output_params

    @property
    def block_params(self) -> int:
        return -(-(self.params - self.root_params) // self.layers)

    @property
    def multiplied_params(self) -> int:
        """The number of weights that are multiplied, not only looked up."""
        return self.params - (self.root_params - self.output_params)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The data that one device computes on at a time."""

    seq_len: int  # tokens in a sequence
    batch_size: int = 1  # sequences
    heads: int = 1  # attention heads; used for "plain" only
    attention: Attention = "fused"  # "fused" never stores all scores (flash attention); "plain" does

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "heads"):
            check_positive(name, getattr(self, name))
        check_choice("attention", self.attention, get_args(Attention))

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def scores(self) -> int:
        """The number of attention scores of a block."""
        return self.heads * self.batch_size * self.seq_len**2


@dataclass(frozen=True, kw_only=True)
class DecoderRun:
    """The model that is trained, and the training settings."""

    decoder: Decoder
    batch: Batch | None = None  # of one device; None to leave activations out
    precision: Precision = "bf16-mixed"  # of the computation; parameters are float32
    optimizer: Optimizer = "adamw"
    checkpointing: Checkpointing = "off"  # as AccelPlugin's gradient_checkpointing

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("optimizer", self.optimizer, get_args(Optimizer))
        check_choice("checkpointing", self.checkpointing, get_args(Checkpointing))

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of the compute dtype."""
        return 4 if self.precision == "32-true" else 2
