"""Sets, graphs and mixtures: scattered sums, top-k, ragged batches."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strangers.table import Items, Made, drawn, drawn_ints, loader, made, training, vectors


class _Adam(LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


class Data:
    """A graph as PyTorch Geometric has it, which goes to a device by itself."""

    def __init__(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> None:
        self.x, self.edge_index, self.batch, self.y = x, edge_index, batch, y

    def to(self, device: Any, non_blocking: bool = False) -> Data:
        return Data(*(value.to(device) for value in (self.x, self.edge_index, self.batch, self.y)))

    def __len__(self) -> int:
        return len(self.y)


def _graphs() -> Items:
    nodes = (4 + drawn_ints(5, 24)).tolist()
    return Items(
        [
            (drawn(n, 5, seed=i), drawn_ints(n, 2, 12, seed=i + 50), drawn_ints(3, 1, seed=i))
            for i, n in enumerate(nodes)
        ]
    )


def _together(graphs: list[Any]) -> Data:
    shift, xs, edges, batch = 0, [], [], []
    for index, (x, edge, _) in enumerate(graphs):
        xs.append(x)
        edges.append(edge + shift)
        batch.append(torch.full((len(x),), index))
        shift += len(x)
    return Data(torch.cat(xs), torch.cat(edges, dim=1), torch.cat(batch), torch.cat([y for *_, y in graphs]))


@training
def gnn_with_index_add() -> Made:
    class Conv(nn.Module):
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.lin_l, self.lin_r = nn.Linear(i, o), nn.Linear(i, o, bias=False)

        def forward(self, x: Tensor, edge: Tensor) -> Tensor:
            messages = self.lin_l(x)[edge[0]]
            out = torch.zeros(len(x), messages.size(1), dtype=x.dtype)
            out.index_add_(0, edge[1], messages)
            return out + self.lin_r(x)

    class GNN(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2, self.head = Conv(5, 12), Conv(12, 12), nn.Linear(12, 3)

        def training_step(self, data: Data, batch_idx: int) -> Tensor:
            x = F.dropout(F.relu(self.conv1(data.x, data.edge_index)), 0.2, self.training)
            x = F.relu(self.conv2(x, data.edge_index))
            pooled = torch.zeros(len(data.y), 12, dtype=x.dtype).index_add_(0, data.batch, x)
            loss = F.cross_entropy(self.head(pooled), data.y)
            self.log("loss", loss, batch_size=len(data.y))
            return loss

    return made(GNN(), loader(_graphs(), collate_fn=_together))


@training
def graph_attention_with_scatter() -> Made:
    class GAT(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.att, self.head = nn.Linear(5, 8), nn.Parameter(torch.randn(16) * 0.3), nn.Linear(8, 3)

        def training_step(self, data: Data, batch_idx: int) -> Tensor:
            h, (src, dst) = self.lin(data.x), data.edge_index
            e = F.leaky_relu(torch.cat([h[src], h[dst]], dim=-1) @ self.att)
            top = torch.full((len(h),), -1e9, dtype=e.dtype).scatter_reduce(0, dst, e.detach(), "amax")
            weight = (e - top[dst]).exp()
            total = torch.zeros(len(h), dtype=weight.dtype).scatter_add_(0, dst, weight)
            alpha = F.dropout(weight / (total[dst] + 1e-9), 0.1)
            out = torch.zeros_like(h).scatter_add(0, dst[:, None].expand(-1, 8), alpha[:, None] * h[src])
            count = torch.bincount(data.batch).clamp(min=1)
            mean = (
                torch.zeros(len(data.y), 8, dtype=out.dtype).scatter_add_(0, data.batch[:, None].expand(-1, 8), out)
                / count[:, None]
            )
            return F.cross_entropy(self.head(mean), data.y)

    return made(GAT(), loader(_graphs(), collate_fn=_together))


@training
def mixture_of_experts_with_index_add() -> Made:
    class MoE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4, bias=False)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.gate(x)
            weights, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), 2, dim=-1)
            weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
            final = torch.zeros_like(x)
            mask = F.one_hot(chosen, 4).permute(2, 1, 0)
            for index, expert in enumerate(self.experts):
                where, rows = torch.where(mask[index])
                final.index_add_(0, rows, (expert(x[rows]) * weights[rows, where, None]).to(x.dtype))
            return final, logits

    class Switch(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.moe, self.out = nn.Linear(8, 8), MoE(), nn.Linear(8, 4)
            self.load = torch.zeros(4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            h, logits = self.moe(self.inp(x))
            self.load = 0.9 * self.load + 0.1 * logits.detach().softmax(-1).mean(0)
            return F.cross_entropy(self.out(h), y) + 0.01 * logits.softmax(-1).mean(0).square().sum()

    return made(Switch(), loader(vectors()))


@training
def experts_written_into_an_empty_output() -> Made:
    class Noisy(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.noise = nn.Parameter(torch.zeros(8, 3)), nn.Parameter(torch.zeros(8, 3))
            self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            scores = x @ self.gate + torch.randn(len(x), 3) * F.softplus(x @ self.noise)
            value, expert = scores.softmax(1).max(dim=1)
            out = x.new_zeros(len(x), 4)
            for index, one in enumerate(self.experts):
                rows = (expert == index).nonzero().squeeze(1)
                if len(rows):
                    out[rows] = one(x[rows])
            return F.cross_entropy(out * value[:, None], y)

    return made(Noisy(), loader(vectors()))


@training
def pointnet_with_a_transform() -> Made:
    class PointNet(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.tnet = nn.Sequential(
                nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(8, 9)
            )
            self.feat = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(True))
            self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            points, y = batch
            points = points + torch.clamp(0.01 * torch.randn(points.shape), -0.05, 0.05)
            x = points.transpose(2, 1)
            trans = self.tnet(x).view(-1, 3, 3) + torch.eye(3)
            x = torch.bmm(points, trans).transpose(2, 1)
            g = self.feat(x).max(dim=2)[0]
            reg = torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - torch.eye(3), dim=(1, 2)).mean()
            return F.cross_entropy(self.head(g), y) + 0.001 * reg

    return made(PointNet(), loader(TensorDataset(drawn(24, 16, 3), drawn_ints(4, 24))))


@training
def ragged_sets_as_lists_of_tensors() -> Made:
    def collate(batch: Any) -> Any:
        sets, labels = zip(*batch, strict=True)
        return list(sets), torch.tensor(labels)

    class DeepSets(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.phi = nn.Sequential(nn.Linear(4, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 12))
            self.rho = nn.Linear(12, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            sets, labels = batch
            return F.cross_entropy(self.rho(torch.stack([self.phi(s).sum(dim=0) for s in sets])), labels)

    items = [(drawn(2 + i % 5, 4, seed=i), i % 2) for i in range(24)]
    return made(DeepSets(), loader(Items(items), collate_fn=collate))


@training
def spectral_graph_of_sparse_matrices() -> Made:
    class GCN(_Adam):
        def __init__(self) -> None:
            super().__init__()
            a = (torch.rand(24, 24, generator=torch.Generator().manual_seed(3)) < 0.15).float()
            a = (a + a.t()).clamp(max=1) + torch.eye(24)
            d = a.sum(1).rsqrt()
            self.adjacency = (d[:, None] * a * d).to_sparse()
            self.x, self.y = drawn(24, 6), drawn_ints(3, 24)
            self.w1, self.w2 = nn.Linear(6, 12), nn.Linear(12, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (rows,) = batch
            h = F.dropout(F.relu(torch.sparse.mm(self.adjacency, self.w1(self.x))), 0.3)
            out = torch.sparse.mm(self.adjacency, self.w2(h))
            return F.nll_loss(F.log_softmax(out[rows], dim=1), self.y[rows])

    return made(GCN(), loader(TensorDataset(torch.arange(24))))
