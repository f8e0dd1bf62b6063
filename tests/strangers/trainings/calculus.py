"""Derivatives by other ways: implicit layers, torch.func, second order, complex numbers, double precision."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strangers.table import Made, drawn, images, loader, made, training, vectors


class _Adam(LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@training
def deep_equilibrium_with_a_backward_hook() -> Made:
    class DEQ(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.w, self.out = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 4)
            nn.init.orthogonal_(self.w.weight, 0.5)

        def solve(self, f: Any, z: Tensor) -> Tensor:
            for _ in range(12):
                z = f(z)
            return z

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            u = self.inp(x)
            with torch.no_grad():
                z = self.solve(lambda z: torch.tanh(self.w(z) + u), torch.zeros_like(u))
            z = torch.tanh(self.w(z) + u)
            z0 = z.clone().detach().requires_grad_()
            f0 = torch.tanh(self.w(z0) + u)
            z.register_hook(lambda g: self.solve(lambda v: torch.autograd.grad(f0, z0, v, retain_graph=True)[0] + g, g))
            return F.cross_entropy(self.out(z), y)

    return made(DEQ(), loader(vectors()))


@training
def neural_ode_by_runge_kutta() -> Made:
    class ODE(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.field, self.nfe = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 8)), 0
            self.head = nn.Linear(8, 4)

        def f(self, t: float, x: Tensor) -> Tensor:
            self.nfe += 1
            return self.field(torch.cat([x, torch.full_like(x[:, :1], t)], dim=1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            h = 0.25
            for i in range(4):
                t = i * h
                k1 = self.f(t, x)
                k2 = self.f(t + h / 2, x + h / 2 * k1)
                k3 = self.f(t + h / 2, x + h / 2 * k2)
                k4 = self.f(t + h, x + h * k3)
                x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            self.log("nfe", float(self.nfe), prog_bar=True)
            return F.cross_entropy(self.head(x), y)

    return made(ODE(), loader(vectors()))


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s * (1 + x * (1 - s)))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.neg() * ctx.alpha, None


@training
def domain_adaptation_with_reversed_gradients() -> Made:
    class DANN(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.label, self.domain = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), nn.Linear(8, 2)

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            x, y = batch
            p = (self.global_step + 1) / 100
            alpha = 2.0 / (1.0 + 2.718281828 ** (-10 * p)) - 1
            h = _Swish.apply(self.conv(x)).mean(dim=(2, 3))
            task = F.cross_entropy(self.label(h), y)
            domain = F.cross_entropy(self.domain(_Reverse.apply(h, alpha)), y % 2)
            return {"loss": task + domain, "task": task.detach(), "alpha": alpha}

    return made(DANN(), loader(images()))


@training
def maml_with_functional_calls() -> Made:
    class MAML(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            params = dict(self.net.named_parameters())

            def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
                return F.cross_entropy(functional_call(self.net, p, (x,)), y)

            half, total = len(x) // 2, 0
            for _ in range(2):
                inner = grad(loss)(params, x[:half], y[:half])
                fast = {name: p - 0.1 * inner[name] for name, p in params.items()}
                total = total + loss(fast, x[half:], y[half:])
            return total

    return made(MAML(), loader(vectors()))


@training
def per_sample_gradients_by_vmap() -> Made:
    """Private learning by hand: gradients of each sample, clipped, with noise."""

    class Private(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            params = {name: p.detach() for name, p in self.net.named_parameters()}

            def loss(p: Any, one: Tensor, label: Tensor) -> Tensor:
                return F.cross_entropy(functional_call(self.net, p, (one[None],)), label[None])

            each = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
            factor = (1.0 / (norms + 1e-6)).clamp(max=1)
            for name, p in self.net.named_parameters():
                clipped = torch.einsum("n,n...->...", factor, each[name])
                p.grad = (clipped + 0.1 * torch.randn_like(p)) / len(x)
            opt = self.optimizers()
            opt.step()
            opt.zero_grad()
            value = loss(params, x[0], y[0])
            self.log("loss", value)
            return value

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return made(Private(), loader(vectors()))


@training
def physics_informed_with_second_derivatives() -> Made:
    class PINN(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.u = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
            self.nu = nn.Parameter(torch.tensor(0.1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            xt = batch[0].requires_grad_(True)
            u = self.u(xt)
            (du,) = torch.autograd.grad(u.sum(), xt, create_graph=True)
            (d2u,) = torch.autograd.grad(du[:, 0].sum(), xt, create_graph=True)
            residual = du[:, 1:] + u * du[:, :1] - self.nu * d2u[:, :1]
            return residual.pow(2).mean() + (u - torch.sin(xt[:, :1])).pow(2).mean()

    return made(PINN(), loader(TensorDataset(drawn(24, 2))))


@training
def score_matching_by_forward_derivatives() -> Made:
    class Sliced(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 8))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            v = torch.randn_like(x).sign()
            s, jv = jvp(self.score, (x,), (v,))
            return ((v * jv).sum(1) + 0.5 * s.pow(2).sum(1)).mean()

    return made(Sliced(), loader(vectors()))


@training
def fourier_layers_of_complex_weights() -> Made:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(0.1 * torch.randn(6, 6, 3, 3, dtype=torch.cfloat))
            self.skip = nn.Conv2d(6, 6, 1)

        def forward(self, x: Tensor) -> Tensor:
            ft = torch.fft.rfft2(x.float())
            out = torch.zeros(len(x), 6, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat)
            out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", ft[:, :, :3, :3], self.weight)
            return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.skip(x))

    class FNO(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 6, 1), Spectral(), Spectral(), nn.Conv2d(6, 1, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            out, y = self.net(x), x.mean(dim=1, keepdim=True).roll(1, -1)
            return ((out - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).mean()

    return made(FNO(), loader(images()))


@training
def gaussian_process_in_double_precision() -> Made:
    class DeepKernel(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
            self.raw = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.double)) for _ in range(2)])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            z = self.features(x).double()
            k = F.softplus(self.raw[0]) * torch.exp(-0.5 * torch.cdist(z, z).pow(2))
            chol = torch.linalg.cholesky(k + F.softplus(self.raw[1]) * torch.eye(len(x), dtype=torch.double))
            alpha = torch.cholesky_solve(y.double()[:, None], chol)
            return (0.5 * y.double() @ alpha.squeeze(1) + chol.diagonal().log().sum()) / len(x)

    return made(DeepKernel(), loader(vectors(), 8))


@training
def hypernetwork_of_conv_filters() -> Made:
    class Hyper(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.make = nn.Embedding(4, 6), nn.Linear(6, 8 * 27)
            self.head = nn.Linear(8, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            w = self.make(self.codes(y)).view(-1, 3, 3, 3)
            out = F.conv2d(x.reshape(1, -1, 8, 8), w, groups=len(x)).view(len(x), 8, 6, 6)
            return F.cross_entropy(self.head(F.relu(out).amax(dim=(2, 3))), y)

    return made(Hyper(), loader(images()))
