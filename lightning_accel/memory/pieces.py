"""Long sequences of layers, recomputed piece by piece: what one piece brings back is gone before the next comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from lightning_accel.memory.recompute import Recomputation, keeps_statistics, recomputed

_DEAR = (_ConvNd, nn.Linear, nn.Bilinear)
MIN_DEAR = 2  # a sequence with one dear layer is one piece


def pieces_of(block: nn.Module) -> list[list[nn.Module]]:
    """Runs of consecutive layers that end in a matrix product or convolution; empty where ``block`` has none.

    Each is to be recomputed whole. All it then keeps is what entered it, the product of the piece before; its own
    product, the last thing in it, nothing asks for again, and recomputation stops short of it.
    """
    if type(block) is not nn.Sequential or any(True for child in block for _ in child.children()):
        return []
    if sum(isinstance(layer, _DEAR) for layer in block) < MIN_DEAR:
        return []
    pieces: list[list[nn.Module]] = [[]]
    for layer in block:
        pieces[-1].append(layer)
        if isinstance(layer, _DEAR):
            pieces.append([])
    return [piece for piece in pieces if piece]


def recomputed_block(
    block: nn.Module,
    original: Callable[..., Any],
    mode: Recomputation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_statistics: bool,
) -> Any:
    """As :func:`recomputed`; where that is selective and ``block`` has pieces, they are recomputed one by one."""
    if mode == "selective" and original is nn.Sequential.forward and len(args) == 1 and not kwargs:
        pieces = pieces_of(block)
        if pieces:
            return _run_pieces(block, pieces, args[0])
    return recomputed(block, original, mode, args, kwargs, has_statistics=has_statistics)


def _run_pieces(block: nn.Module, pieces: Sequence[Sequence[nn.Module]], x: Any) -> Any:
    for piece in pieces:
        if len(piece) == 1:
            x = piece[0](x)
        else:
            has_statistics = any(map(keeps_statistics, piece))
            x = recomputed(block, _chain(piece), "full", (x,), {}, has_statistics=has_statistics)
    return x


def _chain(piece: Sequence[nn.Module]) -> Callable[[nn.Module, Any], Any]:
    def run(block: nn.Module, x: Any) -> Any:
        for layer in piece:
            x = layer(x)
        return x

    return run
