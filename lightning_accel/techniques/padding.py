"""Batches of text, padded to lengths that kernels like and that recur, where the padding is masked.

It declares "rounding". What is added is masked, and has a weight of exactly 0: in exact arithmetic losses and
gradients are those without it. In floating point they are not so to the bit, since for another length kernels choose
other tiles, and add the same numbers, and the zeros, in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.core.device import device_of
from lightning_accel.core.host import Host
from lightning_accel.core.options import Options, Rule
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.core.vocabulary import why_unlucky
from lightning_accel.data.grouped_loader import GroupedLoader, Grouping, why_not_grouped
from lightning_accel.techniques.base import BuildContext, LoaderTerms, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import Forecast, Verdict

_IDS, _MASK, _LABELS, _POSITIONS = "input_ids", "attention_mask", "labels", "position_ids"
IGNORED = -100
"""The label that losses pass over: of torch's cross entropy by default, and so of transformers'."""

_FILLED = {_MASK: 0, "token_type_ids": 0, _POSITIONS: 0, _LABELS: IGNORED}
_MOST = {"cuda": 64, "rocm": 64}  # NVIDIA, Matrix multiplication background: 128 bytes, whatever the card
_MOST_ELSEWHERE = 16
_WASTE = 8  # "auto" makes a batch longer by at most an eighth
_LOADER = "train_dataloader"
_DRAWS = "its training steps draw random numbers, dropout's say, which would be others for longer sequences"


_ABOVE_ONE = Rule("a number above 1, of which lengths become multiples", lambda name, value: value > 1)
Multiple = Literal["auto", "off"] | Annotated[int, _ABOVE_ONE]


@dataclass(frozen=True, kw_only=True, repr=False)
class PaddingOptions(Options, owner="loader.padding"):
    """What ``LoaderOptions(padding=, group_by_length=)`` comes to."""

    multiple: Multiple = "off"
    group_by_length: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_by_length and self.multiple == "off":
            raise ValueError(
                "loader: group_by_length=True with padding='off' groups nothing. Give a multiple, too:"
                " LoaderOptions(padding='auto', group_by_length=True), say."
            )


def padded_length(length: int, multiple: int) -> int:
    """The next multiple."""
    return -(-length // multiple) * multiple


def multiple_for(length: int, most: int) -> int:
    """The largest power of two, ``most`` at most, whose next multiple is at most an eighth longer."""
    return max(1, min(most, (1 << (length.bit_length() - 1)) // _WASTE))


def padded(batch: Mapping[str, Any], length: int, pad_id: int) -> Any:
    """A copy of a batch of (B, T) as one of (B, length); padding comes last, where it shifts no position."""
    ids = batch[_IDS]
    longer = copy.copy(batch)
    for name, fill in {_IDS: pad_id, **_FILLED}.items():
        part = batch.get(name)
        if isinstance(part, Tensor) and part.shape == ids.shape:
            longer[name] = nn.functional.pad(part, (0, length - ids.shape[1]), value=fill)  # type: ignore[index]
    return longer


def why_not_padded(batch: Any) -> str:
    """Why a batch cannot be padded; empty: it can."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get(_IDS), Tensor) or batch[_IDS].dim() != 2:
        return f"a batch is a mapping with {_IDS} of shape (batch, length), not of type {type(batch).__name__}"
    if batch[_IDS].device.type == "xla":
        return "it is on the XLA device before it is seen here, where each length is compiled for: pad in collate_fn"
    shape = batch[_IDS].shape
    mask = batch.get(_MASK)
    if not isinstance(mask, Tensor) or mask.shape != shape:
        return f"without an {_MASK} of the shape of {_IDS} nothing keeps padding out"
    if isinstance(labels := batch.get(_LABELS), Tensor) and labels.shape == shape and labels.is_floating_point():
        return "its labels are no classes, so that none of them is ignored"
    known = {_IDS, *_FILLED}
    for name, part in batch.items():
        if not isinstance(part, Tensor) or (name in known and part.shape == shape):
            continue
        if shape[1] in (part.shape if name == _POSITIONS else part.shape[1:]):  # one row may serve the whole batch
            return f"its {name!r} of shape {tuple(part.shape)} is as long, and how that is padded is not known"
    return ""


# Before compilers, whose shapes become fewer.
@register("padding", options=PaddingOptions, after="preprocess", before=("compile", "loader"), exactness="rounding")
class Padding(Technique):
    """Pads training batches of text, and says which vocabularies have a size that kernels do not like.

    Packing, several texts in one row, is not done: the model's attention would have to know where each begins, and
    labels and positions would be others, which nothing outside of the model can see to.
    """

    traits = Traits(acts_without_sites=True, trial_step=None, remembers=False)

    def __init__(self, settings: PaddingOptions, context: BuildContext) -> None:
        assert settings.multiple != "off"
        self._multiple, self._groups = settings.multiple, settings.group_by_length
        self._grouping = "; no loader of a Trainer to group by length" if self._groups else ""
        self._most = _MOST.get(context.host.kind, _MOST_ELSEWHERE)
        largest = f"up to {self._most}" if self._multiple == "auto" else self._multiple
        self._words = f"batches of text padded to multiples of {largest}"
        self.run.forecast = Forecast(True, "yes", self._words)
        self._pad_id = _pad_id(context.model)
        self._tables = _tables(context.model)
        self._lengths: dict[int, int] = {}  # as they come → as they are padded
        self._complaints: set[str] = set()
        self._model = context.model
        self._may_draw = True  # as far as was seen

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterator[Site]:
        self._say()
        for name, module in model.named_modules():
            if why := why_unlucky(_vocabulary(module), host):
                yield Site(name, why_not=why)

    @override
    def loader(self, loader: Any, terms: LoaderTerms) -> Any:
        if not self._groups:
            return loader
        if why := terms.why_not or why_not_grouped(loader, is_one_of_many=self.run.agree is not None):
            self._tell(f"not grouped by length: {why}", False)
            return loader
        grouped = GroupedLoader(Grouping(loader, self._tell, terms.objection, self.run.agree))
        self.run.at_end.callback(grouped.close)
        return grouped

    @override
    @contextmanager
    def step(self, stage: str) -> Iterator[None]:
        if stage != "train" or _DRAWS in self._complaints:
            yield
            return
        before = StateSnapshot(None, Level.RANDOM, device_of(self._model))
        yield
        self._may_draw = bool(before.drawn())
        if self._may_draw:
            self._leave(_DRAWS)

    def _leave(self, why: str) -> None:
        if why not in self._complaints:
            self._complaints.add(why)
            self.run.revise("batch", Verdict("refused", why))

    @override
    def batch(self, batch: Any, stage: str) -> Any:
        if stage != "train":
            return batch
        if why := why_not_padded(batch):
            self._leave(why)
            return batch
        if self._may_draw:
            return batch
        length = batch[_IDS].shape[1]
        longer = self._lengths.get(length)
        if longer is None:
            longer = self._lengths[length] = self._longer(length)
            self._say()
        return batch if longer == length else padded(batch, longer, self._pad_id)

    def _tell(self, line: str, is_grouped: bool) -> None:
        self._grouping = f"; {line}"
        self._say()
        self.run.revise(_LOADER, Verdict("kept" if is_grouped else "refused", line))
        if not is_grouped:
            self.run.warn(f"padding: batches are {line}")

    def _say(self) -> None:
        met = f": {len(self._lengths)} lengths → {len(set(self._lengths.values()))}" if self._lengths else ""
        self.run.status = f"{self._words}{met}{self._grouping}"

    def _longer(self, length: int) -> int:
        multiple = multiple_for(length, self._most) if self._multiple == "auto" else self._multiple
        longer = padded_length(length, multiple)
        # Not beyond what may be a table of positions, or a mask of them.
        return length if any(length <= size < longer for size in self._tables) else longer


def _pad_id(model: nn.Module) -> int:
    """Some models (RoBERTa) count the tokens that are not padding, by the configuration of transformers."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((pad for config in configs if isinstance(pad := getattr(config, "pad_token_id", None), int)), 0)


def _tables(model: nn.Module) -> set[int]:
    """The sizes of embeddings, and of what modules of the user's own hold: one of them may be the longest sequence."""
    sizes = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            sizes.add(module.num_embeddings)
        elif not type(module).__module__.startswith(("torch.nn.", "transformers.")):
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            sizes |= {size for tensor in own for size in tensor.shape}
    return sizes


def _vocabulary(module: nn.Module) -> int:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings
    return module.out_features if isinstance(module, nn.Linear) else 0
