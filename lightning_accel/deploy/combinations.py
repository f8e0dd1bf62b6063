"""The table of the precisions that each form supports, for ``export``, ``compare_forms`` and the commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast, get_args

from lightning_accel.core.checks import check_choice, nearest

FormName = Literal["pt2", "aoti", "onnx", "tensorrt", "torchscript", "openvino"]
Mode = Literal["int8-dynamic", "int8-static", "int8-weight", "fp16", "bf16"]
Precision = Literal["32", "fp16", "bf16"]
Numbers = Literal["32", "fp16", "bf16", "int8-dynamic", "int8-static", "int8-weight"]

EAGER = "eager"
NUMBERS: tuple[Numbers, ...] = get_args(Numbers)
MODES: tuple[Mode, ...] = get_args(Mode)

# Combinations that fail or save nothing are left out: ONNX Runtime has no bfloat16 kernels for a CPU; torch.export
# cannot read torch.ao's packed weights; aoti, torchscript and openvino convert the weights of int8-weight back to
# float32 when writing, so the file does not shrink.
HOLDS: Mapping[FormName, tuple[Numbers, ...]] = {
    "pt2": ("32", "fp16", "bf16", "int8-weight"),
    "aoti": ("32", "fp16", "bf16"),
    "onnx": ("32", "fp16", "int8-dynamic", "int8-static", "int8-weight"),
    "tensorrt": ("32", "fp16", "bf16"),
    "torchscript": ("32", "fp16", "bf16", "int8-dynamic", "int8-static"),
    "openvino": ("32", "fp16", "bf16"),
}


def forms_with(numbers: str) -> list[str]:
    return [form for form, held in HOLDS.items() if numbers in held]


def check_held(form: str, numbers: str) -> None:
    """Raises a ``ValueError`` unless the form exists and supports this precision."""
    check_choice("form", form, tuple(HOLDS))
    check_choice("precision", numbers, NUMBERS)
    held = HOLDS[cast(FormName, form)]
    if numbers not in held:
        raise ValueError(
            f"form={form!r} is not written with precision={numbers!r}. It is with {', '.join(held)}; {numbers} is"
            f" written as {', '.join(forms_with(numbers))}."
        )


def split(name: str) -> tuple[FormName | None, Numbers]:
    """Splits ``"onnx+int8-dynamic"`` into form and precision. ``"onnx"`` means ``"32"``; ``"bf16"`` has no form.

    Raises:
        ValueError: It is neither ``"eager"``, nor a form, nor a mode, nor a form and a mode that it supports.
    """
    form, plus, numbers = name.partition("+")
    if name in (EAGER, *MODES):
        return None, "32" if name == EAGER else cast(Numbers, name)
    if form not in HOLDS or (plus and numbers not in MODES):
        allowed = (EAGER, *HOLDS, *MODES)
        raise ValueError(
            f"forms: {name!r}{nearest(name, allowed) or '.'} Allowed: {', '.join(allowed)}, and one of each kind with a"
            " plus, 'torchscript+int8-dynamic'."
        )
    check_held(form, numbers or "32")
    return cast(FormName, form), cast(Numbers, numbers or "32")
