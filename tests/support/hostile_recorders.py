"""Hostile models that record, count and cache what they compute, as users and libraries write them."""

from __future__ import annotations

import contextvars
from typing import Any

import torch
from torch import Tensor, nn

from support.hostile_parts import DIM, Attention, Block, Net, Watched, convolutional, row, see

# -- recorders ---------------------------------------------------------------------------------------------------

_recording: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("_recording", default=None)


@row
def records_outputs_in_a_context_variable() -> nn.Module:
    """As transformers records hidden states: whatever a block returns while the model runs is on the record."""

    class Recorded(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            record = _recording.get()
            if record is not None:
                record.append(out)
            return out

    class Records(Net):
        def forward(self, x: Tensor) -> Tensor:
            token = _recording.set([])
            super().forward(x)
            record = _recording.get()
            _recording.reset(token)
            see("record", [tuple(out.shape) for out in record])
            return self.head(torch.stack(record).mean(dim=(0, 2)))

    return Records(Recorded)


@row
def passes_a_list_down() -> nn.Module:
    class Appends(Block):
        def forward(self, x: Tensor, record: list[Tensor]) -> Tensor:
            out = super().forward(x)
            record.append(out)
            return out

    class Passes(Net):
        def forward(self, x: Tensor) -> Tensor:
            x, record = self.tokens(x), []
            for block in self.blocks:
                x = block(x, record)
            see("record", len(record))
            return self.head(torch.cat(record, dim=1).mean(dim=1))

    return Passes(Appends, Appends)


@row
def appends_to_a_list_of_its_own() -> nn.Module:
    class Keeps(Block):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.kept.append(out.detach().mean())
            see("kept", len(self.kept))
            return out + torch.stack(self.kept).mean()

    return Net(Keeps)


@row
def appends_attention_weights_to_a_list() -> nn.Module:
    class Keeps(Attention):
        kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            weights = (q @ k.transpose(-2, -1) / DIM**0.5).softmax(dim=-1)
            self.kept.append(weights)
            return self.out(weights @ v)

    class Entropic(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            kept = self.net.blocks[0].attention.kept
            kept.clear()
            loss = super().loss(x, y)
            see("weights", [tuple(weights.shape) for weights in kept])
            return loss + sum(weights.square().mean() for weights in kept)

    return Entropic(Net(lambda: _with_attention(Keeps())))


@row
def returns_attention_weights_that_are_kept() -> nn.Module:
    class Returns(Attention):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            weights = (q @ k.transpose(-2, -1) / DIM**0.5).softmax(dim=-1)
            return self.out(weights @ v), weights

    class Regularised(Net):
        def forward(self, x: Tensor) -> Tensor:
            x, all_weights = self.tokens(x), []
            for block in self.blocks:
                attended, weights = block.attention(block.norm(x))
                all_weights.append(weights)
                x = x + attended
            see("weights", [tuple(weights.shape) for weights in all_weights])
            return self.head(x.mean(dim=1)) + sum(weights[..., 0].mean() for weights in all_weights)

    return Regularised(*(2 * [lambda: _with_attention(Returns())]))


@row
def keeps_the_weights_of_multihead_attention() -> nn.Module:
    class Multihead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            out, self.last = self.attention(x, x, x)
            see("weights", tuple(self.last.shape))
            return out + self.last.amax()

    return Net(Multihead)


@row
def counts_calls_on_its_class() -> nn.Module:
    class Counts(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counts.calls += 1
            see("call", Counts.calls)
            return super().forward(x) * (1 + 0.01 * Counts.calls)

    return Net(Counts)


@row
def counts_calls_in_a_closure() -> nn.Module:
    calls = 0

    class Counts(Attention):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            see("call", calls)
            return super().forward(x) / calls

    return Net(lambda: _with_attention(Counts()))


@row
def counts_calls_in_a_buffer() -> nn.Module:
    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            see("call", float(self.calls))
            return super().forward(x) / self.calls

    return Net(Counts)


@row
def every_other_call_goes_another_way() -> nn.Module:
    class Alternates(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            see("call", self.calls)
            return super().forward(x) if self.calls % 2 else x + self.mlp(self.norm(x))

    return Net(Alternates)


@row
def raises_on_the_second_call_within_a_step() -> nn.Module:
    class Once(Block):
        def __init__(self) -> None:
            super().__init__()
            self.called = False

        def forward(self, x: Tensor) -> Tensor:
            if self.called:
                raise RuntimeError("called twice in one step")
            self.called = True
            return super().forward(x)

    class Steps(Watched):
        def on_train_batch_start(self, *_: Any) -> None:
            for block in self.net.blocks:
                block.called = False

    return Steps(Net(Once))


# -- caches ------------------------------------------------------------------------------------------------------


@row
def a_cache_of_keys_and_values_that_grows() -> nn.Module:
    """Each call sees the tokens of the calls before it; a call more, and all that follow see too many."""

    class Caches(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            if self.cache:
                k, v = torch.cat([self.cache["k"], k], dim=1), torch.cat([self.cache["v"], v], dim=1)
            self.cache = {"k": k, "v": v}
            see("keys", tuple(k.shape))
            return self.out((q @ k.transpose(-2, -1) / DIM**0.5).softmax(dim=-1) @ v)

    class InChunks(Net):
        def forward(self, x: Tensor) -> Tensor:
            chunks = []
            for block in self.blocks:
                block.attention.cache = {}
            for chunk in self.tokens(x).chunk(4, dim=1):
                for block in self.blocks:
                    chunk = block(chunk)
                chunks.append(chunk)
            return self.head(torch.cat(chunks, dim=1).mean(dim=1))

    return InChunks(*(2 * [lambda: _with_attention(Caches())]))


@row
def a_cache_that_the_caller_passes_in() -> nn.Module:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

        def update(self, keys: Tensor) -> Tensor:
            self.keys.append(keys)
            see("keys", len(self.keys))
            return torch.cat(self.keys, dim=1)

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, *, cache: Cache) -> Tensor:
            keys = cache.update(self.k(x))
            return x + (self.q(x) @ keys.mT / DIM**0.5).softmax(-1) @ keys

    class Shares(Net):
        def forward(self, x: Tensor) -> Tensor:
            x, cache = self.tokens(x), Cache()
            for block in self.blocks:
                x = block(x, cache=cache)
            return self.head(x.mean(dim=1))

    return Shares(Reads, Reads)


@row
def remembers_what_it_computed_for_an_input() -> nn.Module:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.known = convolutional(), {}

        def forward(self, x: Tensor) -> Tensor:
            see("known", x in self.known)
            if x not in self.known:
                self.known = {x: self.inner(x)}
            return self.known[x]

    class Twice(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss(x, y) + super().loss(x, y)

    return Twice(Remembers())


def _with_attention(attention: nn.Module) -> Block:
    block = Block()
    block.attention = attention
    return block
