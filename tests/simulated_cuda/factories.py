"""What no argument brings to the device: memory that is made. And attention, whose kernel torch chooses itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import library as operators

from simulated_cuda import captures
from simulated_cuda.streams import current_device, current_stream
from simulated_cuda.wrappers import wrapped


def _factory_device(device: Any) -> int:
    index = torch.device(device).index if device is not None else None
    return current_device() if index is None else index


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> Tensor:  # fmt: skip
    values = torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format)
    return _made(
        torch.ops.aten.empty.memory_format, (size,), {"dtype": dtype, "device": torch.device("cpu")}, values, device
    )


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> Tensor:  # fmt: skip
    values = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    return _made(
        torch.ops.aten.empty_strided.default,
        (size, stride),
        {"dtype": dtype, "device": torch.device("cpu")},
        values,
        device,
    )


def _made(func: Any, args: Any, kwargs: dict[str, Any], values: Tensor, device: Any) -> Tensor:
    """The memory that every other factory fills."""
    index = _factory_device(device)
    capture = captures.of_launch(current_stream(index))
    tensor = wrapped(values, index)
    if capture is not None:
        capture.recording.add(func, args, kwargs, index, values)
    return tensor


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """The formula itself: torch would choose a kernel."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    attention: Any = torch.ops.aten._scaled_dot_product_attention_math
    result: Tensor = attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[
        0
    ]
    return result


_LIBRARIES: list[Any] = [operators.Library("aten", "IMPL", key) for key in ("CUDA", "AutogradCUDA")]


def install() -> None:
    """Has torch make tensors of a CUDA device here."""
    _LIBRARIES[0].impl("empty.memory_format", _empty)
    _LIBRARIES[0].impl("empty_strided", _empty_strided)
    for library in _LIBRARIES:
        library.impl("scaled_dot_product_attention", _attention)
