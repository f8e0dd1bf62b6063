"""Models that draw: autoencoders, flows, diffusion, codebooks."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.nn import functional as F

from strangers.table import Made, images, loader, made, training, vectors


@training
def vae_of_images() -> Made:
    class VAE(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.Sequential(
                nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(), nn.Conv2d(8, 8, 4, 2, 1), nn.LeakyReLU(), nn.Flatten()
            )
            self.fc_mu, self.fc_var = nn.Linear(32, 4), nn.Linear(32, 4)
            self.dec = nn.Sequential(
                nn.Linear(4, 32),
                nn.Unflatten(1, (8, 2, 2)),
                nn.ConvTranspose2d(8, 8, 4, 2, 1),
                nn.ReLU(),
                nn.ConvTranspose2d(8, 3, 4, 2, 1),
            )

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            x, _ = batch
            h = self.enc(x)
            mu, log_var = self.fc_mu(h), self.fc_var(h)
            std = torch.exp(0.5 * log_var)
            z = mu + torch.randn_like(std) * std
            recons = F.mse_loss(self.dec(z), x)
            kld = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
            self.log_dict({"recons": recons.detach(), "kld": -kld.detach()})
            return {"loss": recons + 0.01 * kld, "z": z.detach()}

        def configure_optimizers(self) -> Any:
            opt = torch.optim.Adam(self.parameters(), lr=5e-3)
            return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)}

    return made(VAE(), loader(images()))


@training
def realnvp_with_log_determinants() -> Made:
    class Coupling(nn.Module):
        def __init__(self, flip: bool) -> None:
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = x.chunk(2, dim=1)
            if self.flip:
                a, b = b, a
            s, t = self.net(a).chunk(2, dim=1)
            s = torch.tanh(s)
            return torch.cat([a, b * s.exp() + t], dim=1), s.sum(dim=1)

    class Flow(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(4))
            self.register_buffer("loc", torch.zeros(8))
            self.register_buffer("scale", torch.ones(8))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0] + torch.rand_like(batch[0]) / 256
            log_det = x.new_zeros(x.shape[0])
            for layer in self.layers:
                x, ld = layer(x)
                log_det += ld
            prior = Independent(Normal(self.loc, self.scale), 1)
            return -(prior.log_prob(x) + log_det).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adamax(self.parameters(), 1e-2)

    return made(Flow(), loader(vectors()))


@training
def ddpm_with_a_running_average() -> Made:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
            self.inp, self.mid, self.out = (
                nn.Conv2d(3, 8, 3, padding=1),
                nn.Conv2d(8, 8, 3, padding=1),
                nn.Conv2d(8, 3, 3, padding=1),
            )
            self.norm, self.attn = nn.GroupNorm(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            freqs = torch.exp(-math.log(100) * torch.arange(4, device=x.device) / 4)
            emb = t[:, None].float() * freqs
            emb = self.time(torch.cat([emb.sin(), emb.cos()], dim=-1))
            h = F.silu(self.norm(self.inp(x) + emb[:, :, None, None]))
            b, c, height, width = h.shape
            tokens = h.view(b, c, -1).permute(0, 2, 1)
            h = h + self.attn(tokens, tokens, tokens)[0].permute(0, 2, 1).view(b, c, height, width)
            return self.out(F.silu(self.mid(h)))

    class DDPM(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Denoiser()
            self.ema = copy.deepcopy(self.model).eval().requires_grad_(False)
            self.register_buffer("bars", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), dim=0), persistent=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x0, _ = batch
            t = torch.randint(0, 50, (len(x0),), device=self.device)
            eps = torch.randn_like(x0)
            bar = self.bars[t].view(-1, 1, 1, 1)
            return F.mse_loss(self.model(bar.sqrt() * x0 + (1 - bar).sqrt() * eps, t), eps)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            with torch.no_grad():
                for p, e in zip(self.model.parameters(), self.ema.parameters(), strict=True):
                    e.mul_(0.9).add_(p, alpha=0.1)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x = torch.randn(2, 3, 8, 8)
            for step in (40, 20, 0):
                x = x - 0.1 * self.ema(x, torch.full((2,), step))
            self.log("sample_std", x.std())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), 2e-3)

    return made(DDPM(), loader(images()), loader(images(4), shuffle=False))


@training
def vqvae_with_averaged_codes() -> Made:
    class Quantizer(nn.Module):
        def __init__(self, codes: int = 8, dim: int = 6) -> None:
            super().__init__()
            self.register_buffer("embed", torch.randn(dim, codes))
            self.register_buffer("cluster_size", torch.zeros(codes))
            self.register_buffer("embed_avg", self.embed.clone())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            flat = x.reshape(-1, x.shape[-1])
            dist = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
            _, ind = (-dist).max(1)
            onehot = F.one_hot(ind, self.embed.shape[1]).type(flat.dtype)
            quantize = F.embedding(ind.view(*x.shape[:-1]), self.embed.t())
            if self.training:
                self.cluster_size.data.mul_(0.99).add_(onehot.sum(0), alpha=0.01)
                self.embed_avg.data.mul_(0.99).add_(flat.detach().t() @ onehot, alpha=0.01)
                n = self.cluster_size.sum()
                size = (self.cluster_size + 1e-5) / (n + 8 * 1e-5) * n
                self.embed.data.copy_(self.embed_avg / size.unsqueeze(0))
            return x + (quantize - x).detach(), (quantize.detach() - x).pow(2).mean(), ind

    class VQVAE(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = nn.Conv2d(3, 6, 4, 2, 1), nn.ConvTranspose2d(6, 3, 4, 2, 1)
            self.vq = Quantizer()

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            x, _ = batch
            z = self.enc(x).permute(0, 2, 3, 1)
            q, commit, codes = self.vq(z)
            loss = F.mse_loss(self.dec(q.permute(0, 3, 1, 2)), x) + 0.25 * commit
            return {"loss": loss, "usage": torch.bincount(codes.flatten(), minlength=8)}

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 3e-3)

    return made(VQVAE(), loader(images()))


@training
def variational_inference_by_hand() -> Made:
    """As pyro has it: a guide, a model, and an evidence bound over named sites."""

    class Bayes(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.params = nn.ParameterDict(
                {"loc": nn.Parameter(torch.zeros(8, 4)), "log_scale": nn.Parameter(torch.full((8, 4), -2.0))}
            )
            self.trace: dict[str, Tensor] = {}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            guide = Normal(self.params["loc"], self.params["log_scale"].exp())
            w = guide.rsample()
            self.trace["w"] = w.detach()
            likelihood = torch.distributions.Categorical(logits=x @ w).log_prob(y).sum()
            elbo = likelihood * 6 - kl_divergence(guide, Normal(torch.zeros(8, 4), 1.0)).sum()
            return -elbo / 24

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(
                [{"params": [self.params["loc"]], "lr": 0.05}, {"params": [self.params["log_scale"]], "lr": 0.01}]
            )

    return made(Bayes(), loader(vectors()))


@training
def pixelcnn_with_masked_weights() -> Made:
    class Masked(nn.Conv2d):
        def __init__(self, kind: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_buffer("mask", torch.ones_like(self.weight))
            h, w = self.weight.shape[-2:]
            self.mask[:, :, h // 2, w // 2 + (kind == "B") :] = 0
            self.mask[:, :, h // 2 + 1 :] = 0

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data *= self.mask
            return super().forward(x)

    class PixelCNN(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                Masked("A", 1, 8, 5, padding=2),
                nn.BatchNorm2d(8),
                nn.ReLU(True),
                Masked("B", 8, 8, 3, padding=1),
                nn.ReLU(True),
                nn.Conv2d(8, 4, 1),
            )

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0][:, :1]
            target = (torch.sigmoid(x[:, 0]) * 3.999).long()
            loss = F.cross_entropy(self.net(x), target, reduction="none").mean(dim=(1, 2))
            self.log("bits", loss.mean().item() * np.log2(np.exp(1)))
            return loss.mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    return made(PixelCNN(), loader(images()))


@training
def anomaly_autoencoder_with_a_threshold() -> Made:
    class Anomaly(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.auto = nn.Sequential(
                nn.Linear(8, 4), nn.PReLU(), nn.Linear(4, 2), nn.PReLU(), nn.Linear(2, 4), nn.PReLU(), nn.Linear(4, 8)
            )
            self.errors, self.threshold = [], None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            noisy = x * (torch.rand_like(x) > 0.1)
            error = (self.auto(noisy) - x).pow(2).mean(dim=1)
            self.errors.append(error.detach())
            return error.mean()

        def on_train_epoch_end(self) -> None:
            self.threshold = torch.quantile(torch.cat(self.errors), 0.95)
            self.errors = []

        def configure_optimizers(self) -> Any:
            return torch.optim.Rprop(self.parameters(), 1e-3)

    return made(Anomaly(), loader(vectors()))
