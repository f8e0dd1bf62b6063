"""Text, speech and time series."""

from __future__ import annotations

import random
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import TensorDataset

from strangers.table import Items, Made, drawn, drawn_ints, loader, made, training

VOCAB = 20


def _tokens(length: int = 12) -> TensorDataset:
    return TensorDataset(drawn_ints(VOCAB, 24, length))


class _Adam(LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=0.1)


@training
def gpt_with_a_tied_head() -> Made:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)
            self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
            self.register_buffer("bias", torch.tril(torch.ones(12, 12)).view(1, 1, 12, 12))

        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.size()
            q, k, v = (part.view(B, T, 4, C // 4).transpose(1, 2) for part in self.c_attn(x).split(16, dim=2))
            att = (q @ k.transpose(-2, -1)) * (1.0 / 4**0.5)
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
            return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(16), Attention(), nn.LayerNorm(16)
            self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class GPT(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe, self.drop = nn.Embedding(VOCAB, 16), nn.Embedding(12, 16), nn.Dropout(0.1)
            self.h, self.ln_f = nn.ModuleList([Block(), Block()]), nn.LayerNorm(16)
            self.lm_head = nn.Linear(16, VOCAB, bias=False)
            self.wte.weight = self.lm_head.weight

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (ids,) = batch
            x = self.drop(self.wte(ids[:, :-1]) + self.wpe(torch.arange(11)))
            for block in self.h:
                x = block(x)
            logits = self.lm_head(self.ln_f(x))
            return F.cross_entropy(logits.view(-1, VOCAB), ids[:, 1:].reshape(-1), ignore_index=-1)

        def configure_optimizers(self) -> Any:
            decay = [p for p in self.parameters() if p.dim() >= 2]
            nodecay = [p for p in self.parameters() if p.dim() < 2]
            opt = torch.optim.AdamW(
                [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}],
                lr=3e-3,
                betas=(0.9, 0.95),
            )
            sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=1000)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}

    return made(GPT(), loader(_tokens()), gradient_clip_val=1.0)


@training
def seq2seq_with_scheduled_sampling() -> Made:
    class Seq2Seq(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.enc, self.dec = nn.Embedding(VOCAB, 8), nn.GRU(8, 12, batch_first=True), nn.GRUCell(8, 12)
            self.out = nn.Linear(12, VOCAB)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (ids,) = batch
            _, h = self.enc(self.embed(ids))
            h, token, loss = h[0], torch.zeros(len(ids), dtype=torch.long), 0
            for t in range(6):
                h = self.dec(self.embed(token), h)
                logits = self.out(h)
                loss = loss + F.cross_entropy(logits, ids[:, t])
                token = ids[:, t] if random.random() < 0.6 else logits.argmax(-1)
            return loss / 6

    return made(Seq2Seq(), loader(_tokens()))


@training
def crnn_with_ctc() -> Made:
    class CRNN(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.cnn = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1),
                nn.ReLU(True),
                nn.MaxPool2d((2, 1)),
                nn.Dropout(0.1),
                nn.Conv2d(8, 8, (4, 1)),
                nn.ReLU(True),
            )
            self.rnn, self.fc = nn.LSTM(8, 8, bidirectional=True), nn.Linear(16, 6)
            self.ctc = nn.CTCLoss(zero_infinity=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, labels, lengths = batch
            feats = self.cnn(images).squeeze(2).permute(2, 0, 1)
            out, _ = self.rnn(feats)
            logp = self.fc(out).log_softmax(2)
            return self.ctc(logp, labels, torch.full((len(images),), logp.size(0), dtype=torch.long), lengths)

    lines = TensorDataset(drawn(24, 1, 8, 14), 1 + drawn_ints(5, 24, 4), 2 + drawn_ints(3, 24))
    return made(CRNN(), loader(lines))


@training
def lstm_of_packed_sentences() -> Made:
    def collate(batch: Any) -> Any:
        batch.sort(key=lambda pair: len(pair[0]), reverse=True)
        ids, labels = zip(*batch, strict=True)
        return pad_sequence(list(ids), batch_first=True), torch.tensor([len(i) for i in ids]), torch.stack(labels)

    class Tagger(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 8, padding_idx=0)
            self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
            self.fc = nn.Linear(16, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids, lengths, labels = batch
            packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True)
            out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            mask = (ids != 0).unsqueeze(-1)
            return F.cross_entropy(self.fc((out * mask).sum(1) / lengths.unsqueeze(1)), labels)

    lengths, labels = 3 + drawn_ints(9, 24), drawn_ints(4, 24, seed=3)
    items = [
        (1 + drawn_ints(VOCAB - 1, int(n), seed=i), y) for i, (n, y) in enumerate(zip(lengths, labels, strict=True))
    ]
    return made(Tagger(), loader(Items(items), collate_fn=collate))


@training
def truncated_backpropagation_with_a_carried_state() -> Made:
    class CharRNN(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.out = (
                nn.Embedding(VOCAB, 8),
                nn.LSTM(8, 12, batch_first=True),
                nn.Linear(12, VOCAB),
            )
            self.hidden = None

        def on_train_epoch_start(self) -> None:
            self.hidden = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (ids,) = batch
            if self.hidden is not None:
                self.hidden = tuple(h.detach() for h in self.hidden)
            out, self.hidden = self.rnn(self.embed(ids[:, :-1]), self.hidden)
            return F.cross_entropy(self.out(out).transpose(1, 2), ids[:, 1:])

    return made(CharRNN(), loader(_tokens(), shuffle=False))


@training
def translation_by_nn_transformer() -> Made:
    class Translate(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.src, self.tgt = nn.Embedding(VOCAB, 16), nn.Embedding(VOCAB, 16)
            self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
            self.out = nn.Linear(16, VOCAB)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (ids,) = batch
            target = ids.flip(1)
            mask = nn.Transformer.generate_square_subsequent_mask(11)
            padding = ids == 0
            y = self.transformer(
                self.src(ids),
                self.tgt(target[:, :-1]),
                tgt_mask=mask,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            )
            return F.cross_entropy(self.out(y).reshape(-1, VOCAB), target[:, 1:].reshape(-1), label_smoothing=0.1)

    return made(Translate(), loader(_tokens()))


@training
def masked_language_model() -> Made:
    class BERT(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB + 1, 16)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
            self.head = nn.Linear(16, VOCAB)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (ids,) = batch
            chosen = torch.bernoulli(torch.full(ids.shape, 0.3)).bool()
            chosen[:, 0] = True
            labels = ids.masked_fill(~chosen, -100)
            masked = ids.masked_fill(chosen & (torch.rand(ids.shape) < 0.8), VOCAB)
            hidden = self.encoder(self.embed(masked), src_key_padding_mask=ids == 0)
            return F.cross_entropy(self.head(hidden).permute(0, 2, 1), labels)

    return made(BERT(), loader(_tokens()))
