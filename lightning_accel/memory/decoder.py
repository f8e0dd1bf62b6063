"""A decoder's parameters, batch and training settings, on which its memory depends."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import Literal, get_args

from lightning_accel.core.checks import check_choice

Precision = Literal["32-true", "16-mixed", "bf16-mixed"]
Optimizer = Literal["adamw", "adam", "sgd", "sgd-momentum"]
Checkpointing = Literal["off", "selective", "full"]
Attention = Literal["fused", "plain"]

# Parameters and blocks of the models in Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1,
# https://arxiv.org/abs/2005.14165.
_DEPTHS = {125e6: 12, 350e6: 24, 760e6: 24, 1.3e9: 24, 2.7e9: 32, 6.7e9: 32, 13e9: 40, 175e9: 96}


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
