"""The sites of nn.MultiheadAttention: found or refused, called as forward is, and judged by what their users read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.techniques.flash_attention.backend_trial import Rehearsal
from lightning_accel.techniques.flash_attention.backends import Sdpa
from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention
from lightning_accel.techniques.flash_attention.sites import MultiheadSite, find_multihead
from lightning_accel.techniques.site import Site
from support.techniques.flash_attention.multihead_cases import EMBED_DIM, NUM_HEADS, inputs, padding, pair
from support.techniques.flash_attention.recorder import Recorder

pytestmark = pytest.mark.numbers


def test_every_site_of_a_transformer_is_found() -> None:
    found = list(find_multihead(nn.Transformer(16, 2, 1, 1, 24, batch_first=True)))

    assert all(isinstance(site, MultiheadSite) and site.what == "nn.MultiheadAttention" for site in found)
    assert [site.site for site in found] == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]


def test_what_is_no_site_is_refused_with_a_reason() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Named(nn.MultiheadAttention):
        pass

    rebound = nn.MultiheadAttention(8, 2)
    rebound.forward = rebound.forward  # type: ignore[method-assign]
    model = nn.ModuleDict(
        {"flash": FlashMultiheadAttention(8, 2), "own": Own(8, 2), "rebound": rebound, "named": Named(8, 2)}
    )
    claims = {claim.site: claim for claim in find_multihead(model)}

    reasons = {site: claim.why_not for site, claim in claims.items() if isinstance(claim, Site)}
    assert reasons == {
        "flash": "already fused",
        "own": "Own computes attention in a forward pass of its own",
        "rebound": "its forward pass was replaced by another's code",
    }
    assert isinstance(claims["named"], MultiheadSite)


def test_a_site_takes_the_arguments_of_forward() -> None:
    plain, _ = pair(batch_first=True)
    tensors, sizes = inputs(plain, "batch first", 5, 7)
    site = MultiheadSite("attn", plain)
    recorder = Recorder()

    out, weights = site.run(
        recorder, nn.MultiheadAttention.forward, (*tensors, padding(sizes)), {"need_weights": False}
    )

    assert weights is None
    assert len(recorder.calls) == 1
    torch.testing.assert_close(out, plain(*tensors, padding(sizes), need_weights=False)[0])


class Standin(Rehearsal):
    """A rehearsal by a function."""

    def __init__(self, rehearse: Any) -> None:
        self.rehearse = rehearse  # type: ignore[method-assign]


class Block(nn.Module):
    """A user's module around a site, whose forward stands in for the dispatch of the technique."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(EMBED_DIM, NUM_HEADS)
        site = self.site = MultiheadSite("attn", self.attn)
        # Functions of the package, as techniques rebind `forward` to, and as trials call both sides from.
        names: dict[str, Any] = {"__name__": "lightning_accel.dispatched", "site": site, "backend": Sdpa(), "seen": []}
        names |= {"original": nn.MultiheadAttention.forward, "Rehearsal": Standin}
        exec(
            "def rehearse(original, fused, args, kwargs, module, judged):\n"
            "    out, _ = fused(backend)(*args, **kwargs)\n"
            "    seen.append(judged((out, 'weights')))\n"
            "def forward(*args, **kwargs):\n"
            "    return site.run(Rehearsal(rehearse), original, args, kwargs)\n",
            names,
        )
        self.attn.forward = names["forward"]  # type: ignore[method-assign]
        self.seen: list[Any] = names["seen"]


class Discarding(Block):
    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attn(x, x, x)
        return out  # type: ignore[no-any-return]


class Reading(Block):
    def forward(self, x: Tensor) -> Any:
        out, weights = self.attn(x, x, x)
        return out, weights


def test_of_a_site_whose_weights_are_thrown_away_the_output_alone_is_judged() -> None:
    block = Discarding()
    out = block(torch.randn(5, 2, EMBED_DIM))

    torch.testing.assert_close(block.seen[0], out)
    assert block.site.nothing_found() is None


def test_a_site_whose_weights_are_read_says_that_there_was_nothing_to_fuse() -> None:
    block = Reading()
    _, weights = block(torch.randn(5, 2, EMBED_DIM))

    assert weights.shape == (2, 5, 5)
    assert block.seen[0][1] == "weights"
    assert block.site.nothing_found() == "its attention weights are asked for, and may be read"
