"""Hostile models by how they look at tensors: random streams, strides, views, dtypes, recurrences."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from support.hostile_parts import CLASSES, DIM, TOKENS, Block, Net, Watched, convolutional, row, see

# -- random streams ----------------------------------------------------------------------------------------------


@row(recomputed=True)
def draws_random_numbers() -> nn.Module:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            keep = (torch.rand(x.shape[0], 1, 1) > 0.2).to(x.dtype)
            return x + keep * super().forward(x + 0.1 * torch.randn_like(x))

    return Net(Noisy)


@row
def draws_from_generators_of_its_own() -> nn.Module:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)
            self.dice = random.Random(3)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=self.generator)
            return super().forward(x + 0.1 * noise) * self.dice.choice([0.5, 1.0])

    return Net(Noisy)


@row
def reads_the_states_of_random_streams() -> nn.Module:
    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            see("torch", torch.get_rng_state().sum().item(), "python", hash(random.getstate()))
            random.random()
            return super().forward(x)

    return Net(Reads)


# -- strides and storages ----------------------------------------------------------------------------------------


class _ThenReLU(nn.Module):
    """A convolution, something done to what it returns, and a ReLU."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.conv, self.relu, self.look = nn.Conv2d(DIM, DIM, 3, padding=1), nn.ReLU(), look

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.look(self.conv(x)))


@row
def insists_on_contiguous_tensors() -> nn.Module:
    def insist(x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise ValueError("this kernel takes contiguous tensors only")
        return x * 2

    return convolutional(_ThenReLU(insist))


@row
def insists_on_rows_that_lie_together() -> nn.Module:
    def insist(x: Tensor) -> Tensor:
        assert x.stride(3) == 1, "rows have to lie together"
        return x * 2

    return convolutional(_ThenReLU(insist))


@row
def views_what_a_convolution_returns() -> nn.Module:
    return convolutional(_ThenReLU(lambda x: x.view(x.size(0), -1).softmax(-1).view(x.shape)))


@row
def views_on_a_branch_first_taken_late() -> nn.Module:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.steps = convolutional()[:6], 0
            self.head = nn.Linear(DIM * TOKENS, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            x = self.net(x)
            flat = x.view(x.size(0), -1) if self.steps >= 5 else x.flatten(1)
            return self.head(flat * self.steps)

    class Longer(Watched):
        steps = 8

    return Longer(Late())


@row
def insists_on_contiguous_tensors_late() -> nn.Module:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.steps = convolutional(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            x = self.net[:3](x)
            if self.steps >= 5 and not x.is_contiguous():
                raise ValueError("this kernel takes contiguous tensors only")
            return self.net[3:](x)

    class Longer(Watched):
        steps = 8

    return Longer(Late())


@row
def writes_strides_down() -> nn.Module:
    def patches(x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        x = x.contiguous()
        windows = x.as_strided((B, C, H // 2, W // 2), (C * H * W, H * W, 2 * W, 2))
        return F.interpolate(windows, scale_factor=2)

    return convolutional(_ThenReLU(patches))


@row
def writes_strides_down_without_asking() -> nn.Module:
    """``as_strided`` reads what lies there, in whatever order: with another layout, silently other numbers."""

    def transposed(x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        return x.as_strided((B, C, W, H), (C * H * W, H * W, 1, W))

    return convolutional(_ThenReLU(transposed))


@row
def asks_whether_its_output_is_its_input() -> nn.Module:
    def fresh(x: Tensor) -> Tensor:
        out = F.relu(x)
        if out.data_ptr() == x.data_ptr():
            raise ValueError("overwritten")
        return out + x

    class Asks(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.mlp[0](x)
            activated = self.mlp[1](hidden)
            if activated.data_ptr() == hidden.data_ptr():
                raise ValueError("overwritten")
            return x + self.mlp[3](activated) + fresh(x)

    return Net(Asks)


@row
def reads_what_went_into_an_activation() -> nn.Module:
    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.mlp[0](x)
            activated = self.mlp[1](hidden)
            return x + self.mlp[3](activated + 0.1 * hidden)

    return Net(Reads)


@row
def reads_what_went_into_an_activation_late() -> nn.Module:
    class Reads(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            hidden = self.mlp[0](x)
            activated = self.mlp[1](hidden)
            return x + self.mlp[3](activated + hidden if self.calls > 3 else activated)

    return Net(Reads)


# -- ways of passing values --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    tokens: Tensor
    note: str


@row
def passes_named_tuples_by_keyword() -> nn.Module:
    class Pairs(Block):
        def forward(self, *, pair: Pair) -> Pair:
            see("pair", pair.note, tuple(pair.tokens.shape))
            return Pair(super().forward(pair.tokens), note=pair.note + "+")

    class Passes(Net):
        def forward(self, x: Tensor) -> Tensor:
            pair = Pair(self.tokens(x), "")
            for block in self.blocks:
                pair = block(pair=pair)
            return self.head(pair.tokens.mean(dim=1))

    return Passes(Pairs, Pairs)


@row
def runs_blocks_in_threads() -> nn.Module:
    class Threads(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.tokens(x)
            with ThreadPoolExecutor(1) as pool:
                outs = [pool.submit(block.attention, x).result() for block in self.blocks]
            see("threads", [tuple(out.shape) for out in outs])
            return self.head(sum(outs).mean(dim=1))

    return Threads(second=Block)


# -- other layers and dtypes -------------------------------------------------------------------------------------


class _Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn, self.head = kind(24, DIM, batch_first=True), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 1, 3).flatten(2)
        lengths = torch.tensor([8, 5, 7, 3])[: x.shape[0]]
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(out.relu().mean(dim=1))


@row
def an_lstm_over_packed_sequences() -> nn.Module:
    return _Recurrent(nn.LSTM)


@row
def a_gru_over_packed_sequences() -> nn.Module:
    return _Recurrent(nn.GRU)


class _Bag(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.act, self.head = embedding, nn.ReLU(), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        words = self.embedding((x.flatten(1) * 5).long() % 50)
        return self.head(self.act(words if words.dim() == 2 else words.mean(dim=1)))


@row
def an_embedding_bag() -> nn.Module:
    return _Bag(nn.EmbeddingBag(50, DIM))


@row
def sparse_gradients() -> nn.Module:
    class Sparse(Watched):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Sparse(_Bag(nn.Embedding(50, DIM, sparse=True)))


@row
def complex_parameters() -> nn.Module:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, 8, 5, dtype=torch.complex64))
            self.conv, self.act = nn.Conv2d(DIM, DIM, 1, dtype=torch.complex64), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            spectrum = self.act(0.1 * self.conv(torch.fft.rfft2(x, norm="ortho")) * self.weight)
            return torch.fft.irfft2(spectrum, s=x.shape[-2:], norm="ortho")

    return convolutional(Fourier())


@row
def double_precision() -> nn.Module:
    class Double(Net):
        def __init__(self) -> None:
            super().__init__()
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.double())

    return Double()


@row
def convolutions_in_three_dimensions() -> nn.Module:
    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.Sequential(
                nn.Conv3d(1, DIM, 3, padding=1),
                nn.BatchNorm3d(DIM),
                nn.ReLU(),
                nn.Conv3d(DIM, DIM, 3, padding=1),
                nn.ReLU(),
            )
            self.head = nn.Linear(DIM, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.convs(x.unsqueeze(1)).flatten(2).mean(-1))

    return Volume()
