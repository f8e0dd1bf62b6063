"""Two networks against each other, optimized by hand."""

from __future__ import annotations

import random
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from strangers.table import Made, images, loader, made, training


def _generator(latent: int = 6) -> nn.Module:
    return nn.Sequential(
        nn.Linear(latent, 8 * 2 * 2),
        nn.Unflatten(1, (8, 2, 2)),
        nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def _critic() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Dropout2d(0.25),
        nn.Conv2d(8, 8, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 2 * 2, 1),
    )


class _Pool:
    """Fifty fakes of earlier steps, as in CycleGAN's repository."""

    def __init__(self, size: int = 10) -> None:
        self.size, self.images = size, []

    def query(self, images: Tensor) -> Tensor:
        returned = []
        for image in images:
            image = image.unsqueeze(0)
            if len(self.images) < self.size:
                self.images.append(image)
                returned.append(image)
            elif random.uniform(0, 1) > 0.5:
                index = random.randint(0, self.size - 1)
                returned.append(self.images[index].clone())
                self.images[index] = image
            else:
                returned.append(image)
        return torch.cat(returned, 0)


@training
def dcgan_with_toggled_optimizers() -> Made:
    class DCGAN(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = _generator(), _critic()
            self.register_buffer("shown", torch.randn(4, 6))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            real, _ = batch
            g_opt, d_opt = self.optimizers()
            z = torch.randn(real.size(0), 6).type_as(real)

            self.toggle_optimizer(g_opt)
            self.fake = self.generator(z)
            valid = torch.ones(real.size(0), 1).type_as(real)
            g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self.fake), valid)
            g_opt.zero_grad()
            self.manual_backward(g_loss)
            g_opt.step()
            self.untoggle_optimizer(g_opt)

            self.toggle_optimizer(d_opt)
            d_real = F.binary_cross_entropy_with_logits(self.discriminator(real), valid)
            d_fake = F.binary_cross_entropy_with_logits(self.discriminator(self.fake.detach()), torch.zeros_like(valid))
            d_loss = (d_real + d_fake) / 2
            d_opt.zero_grad()
            self.manual_backward(d_loss)
            d_opt.step()
            self.untoggle_optimizer(d_opt)
            self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)
            return {"g": g_loss.detach(), "d": d_loss.detach()}

        def on_train_epoch_end(self) -> None:
            self.samples = self.generator(self.shown).detach()

        def configure_optimizers(self) -> Any:
            return (
                torch.optim.Adam(self.generator.parameters(), 2e-4, betas=(0.5, 0.999)),
                torch.optim.Adam(self.discriminator.parameters(), 2e-4, betas=(0.5, 0.999)),
            )

    return made(DCGAN(), loader(images()))


@training
def cyclegan_with_an_image_pool() -> Made:
    class CycleGAN(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

            def translator() -> nn.Module:
                return nn.Sequential(
                    nn.ReflectionPad2d(1),
                    nn.Conv2d(3, 6, 3),
                    nn.InstanceNorm2d(6),
                    nn.ReLU(True),
                    nn.Conv2d(6, 3, 1),
                    nn.Tanh(),
                )

            self.there, self.back = translator(), translator()
            self.critic = _critic()
            self.pool = _Pool()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            real, _ = batch
            other = real.flip(-1) * 0.5
            opt_g, opt_d = self.optimizers()
            fake = self.there(real)
            cycle = F.l1_loss(self.back(fake), real) + F.l1_loss(self.there(self.back(other)), other)
            score = self.critic(fake)
            loss = F.mse_loss(score, torch.ones_like(score)) + 10 * cycle
            opt_g.zero_grad(set_to_none=True)
            self.manual_backward(loss)
            opt_g.step()
            pooled = self.pool.query(fake.detach())
            opt_d.zero_grad(set_to_none=True)
            real_score, fake_score = self.critic(other), self.critic(pooled)
            d_loss = F.mse_loss(real_score, torch.ones_like(real_score)) + F.mse_loss(
                fake_score, torch.zeros_like(fake_score)
            )
            self.manual_backward(d_loss)
            opt_d.step()
            self.log("loss_g", loss, on_step=True, on_epoch=True)
            self.log("loss_d", d_loss, on_step=True, on_epoch=True)

        def configure_optimizers(self) -> Any:
            translators = [*self.there.parameters(), *self.back.parameters()]
            return [torch.optim.Adam(translators, 1e-3), torch.optim.Adam(self.critic.parameters(), 1e-3)], []

    return made(CycleGAN(), loader(images()))


@training
def wgan_with_a_gradient_penalty() -> Made:
    class WGANGP(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3 * 8 * 8))
            self.D = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(128, 1))

        def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
            alpha = torch.rand(real.size(0), 1, 1, 1, device=self.device)
            mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
            scores = self.D(mixed)
            (grads,) = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True)
            return ((grads.view(grads.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            real = batch[0]
            g_opt, d_opt = self.optimizers()
            fake = self.G(torch.randn(real.size(0), 4, device=self.device)).view_as(real)
            d_loss = self.D(fake.detach()).mean() - self.D(real).mean() + 10 * self.penalty(real, fake.detach())
            d_opt.zero_grad()
            self.manual_backward(d_loss)
            d_opt.step()
            if batch_idx % 3 == 0:
                g_opt.zero_grad()
                self.manual_backward(-self.D(fake).mean())
                g_opt.step()
            return d_loss.detach()

        def configure_optimizers(self) -> Any:
            return [torch.optim.RMSprop(self.G.parameters(), 1e-3), torch.optim.RMSprop(self.D.parameters(), 1e-3)]

    return made(WGANGP(), loader(images()))


@training
def energy_model_with_a_replay_buffer() -> Made:
    """As in the UvA tutorials: Langevin steps on the images, from samples of earlier steps."""

    class Sampler:
        def __init__(self, model: nn.Module) -> None:
            self.model = model
            self.examples = [torch.rand(1, 3, 8, 8) * 2 - 1 for _ in range(8)]

        def sample(self, count: int, steps: int = 3) -> Tensor:
            old = random.choices(self.examples, k=count - 1)
            start = torch.cat([torch.rand(1, 3, 8, 8) * 2 - 1, *old], dim=0).detach()
            training = self.model.training
            self.model.eval()
            for p in self.model.parameters():
                p.requires_grad = False
            start.requires_grad = True
            noise = torch.randn(start.shape)
            with torch.enable_grad():
                for _ in range(steps):
                    noise.normal_(0, 0.005)
                    start.data.add_(noise)
                    (-self.model(start)).sum().backward()
                    start.data.add_(-10 * start.grad.data.clamp_(-0.03, 0.03))
                    start.grad.detach_()
                    start.grad.zero_()
                    start.data.clamp_(-1, 1)
            for p in self.model.parameters():
                p.requires_grad = True
            self.model.train(training)
            self.examples = (list(start.detach().chunk(count, dim=0)) + self.examples)[:16]
            return start.detach()

    class EnergyModel(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.cnn = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(32, 1)
            )
            self.sampler = Sampler(self.cnn)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            real, _ = batch
            real.add_(torch.randn_like(real) * 0.005).clamp_(min=-1.0, max=1.0)
            both = torch.cat([real, self.sampler.sample(len(real))], dim=0)
            real_out, fake_out = self.cnn(both).chunk(2, dim=0)
            reg = 0.1 * (real_out**2 + fake_out**2).mean()
            self.log("divergence", fake_out.mean() - real_out.mean())
            return reg + fake_out.mean() - real_out.mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 1e-3, betas=(0.0, 0.999))
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97)]

    return made(EnergyModel(), loader(images()), gradient_clip_val=0.1)


@training
def gan_that_keeps_its_last_fake_for_the_next_step() -> Made:
    class Lagged(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.G, self.D = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
            self.last = None

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            opt = self.optimizers()
            fake = self.G(torch.randn(len(batch[0]), 4))
            old = self.D(self.last).mean() if self.last is not None else 0.0
            loss = F.softplus(self.D(batch[0])).mean() + F.softplus(-self.D(fake)).mean() + old
            self.last = fake.detach()
            opt.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(opt, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            opt.step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    from strangers.table import vectors

    return made(Lagged(), loader(vectors()))
