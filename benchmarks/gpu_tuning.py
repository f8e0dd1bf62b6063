"""Live trials on a GPU: ResNet-50, GPT-2 of 124M, ViT-B/16, as a run of 1,000 steps would settle them.

    make gpu PYTHON=python3                                   # among the rest
    python benchmarks/gpu_tuning.py --out docs/results        # the package installed

Weights are random, batches synthetic and on the device. Each model trains in a plain loop, in float32 as most programs
are written, and in one with live trials, once with bfloat16 as an arm and once without. What those settle on, or have
come to when they are cut off, then takes turns with the plain loop in bursts of steps between two synchronisations, in
a loop without trials. MFU is the FLOPs of a plain step, by torch's own counter,
over its time and the bfloat16 rate of a large matrix product on this very device: no data sheet's. A model whose
package is not installed is left out. Takes under four minutes.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from _gpu import arguments, is_possible, table, write
from _tuning_loop import PlainLoop, Task, in_words, settled_loop
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_accel import Plan
from lightning_accel.claims.measure import median_interval

Precision = Literal["auto", "32-true"]

STEPS, SECONDS = 1000, 30.0  # that the trials are told of; after which a run that has not settled is cut off
BURST, ROUNDS = 4, 7
IMAGE, SMALL_IMAGE = 224, 32
PRECISIONS: Mapping[Precision, str] = {"auto": "bfloat16 an arm", "32-true": "float32"}


def torchvision_resnet(small: bool) -> nn.Module:
    models: Any = importlib.import_module("torchvision.models")
    return models.resnet50()  # type: ignore[no-any-return]


def timm_resnet(small: bool) -> nn.Module:
    return importlib.import_module("timm").create_model("resnet50")  # type: ignore[no-any-return]


def transformers_resnet(small: bool) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))  # whose other sizes are ResNet-50's


def transformers_gpt2(small: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2} if small else {}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes))


def torchvision_vit(small: bool) -> nn.Module:
    models: Any = importlib.import_module("torchvision.models")
    return models.vit_b_16(image_size=SMALL_IMAGE if small else IMAGE)  # type: ignore[no-any-return]


def timm_vit(small: bool) -> nn.Module:
    timm = importlib.import_module("timm")
    return timm.create_model("vit_base_patch16_224", img_size=SMALL_IMAGE if small else IMAGE)  # type: ignore[no-any-return]


def transformers_vit(small: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": SMALL_IMAGE, "num_hidden_layers": 2} if small else {}
    return ViTForImageClassification(ViTConfig(num_labels=1000, **sizes))


@dataclass(frozen=True)
class Case:
    """A model, from the first package that is there.

    Attributes:
        sources: Package → what makes the model with it, tiny where told to.
        batch: Samples a step.
        of: What a sample is: an image of 224x224, or 1,024 tokens.
    """

    sources: Mapping[str, Callable[[bool], nn.Module]]
    batch: int
    of: Literal["image", "text"]


CASES = {
    "ResNet-50": Case(
        {"torchvision": torchvision_resnet, "timm": timm_resnet, "transformers": transformers_resnet}, 128, "image"
    ),
    "GPT-2 124M": Case({"transformers": transformers_gpt2}, 8, "text"),
    "ViT-B/16": Case({"torchvision": torchvision_vit, "timm": timm_vit, "transformers": transformers_vit}, 64, "image"),
}


def source(case: Case) -> str | None:
    """The package that the model is from; None: none of them is installed."""
    return next((package for package in case.sources if importlib.util.find_spec(package)), None)


def task(case: Case, package: str, small: bool) -> Task:
    """The model with random weights, and one synthetic batch, again and again."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    module = case.sources[package](small).to(device).train()
    size = 2 if small else case.batch
    if case.of == "image":
        side = SMALL_IMAGE if small else IMAGE
        batch = torch.randn(size, 3, side, side, device=device), torch.randint(1000, (size,), device=device)
    else:
        tokens = torch.randint(50257, (size, 33 if small else 1025), device=device)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        outputs = module(inputs)
        logits = getattr(outputs, "logits", outputs)
        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())

    return Task(module, loss, itertools.repeat(batch))


@dataclass(frozen=True)
class Measured:
    """What came of one model.

    Attributes:
        settled: The arms that hold, in words.
        is_settled: Whether nothing was to be decided any more.
        steps: After so many steps that was so, or the run was cut off.
        samples_per_sec: Plain, and with what was settled on.
        over_plain: The ratio of those in paired bursts: median, and the ends of its 95% interval.
        reported: How many times as fast as plain the run itself found it.
        mfu: Plain, and with what was settled on.
        arms: A line for each comparison.
    """

    model: str
    package: str
    precision: Precision
    settled: str
    is_settled: bool
    steps: int
    samples_per_sec: tuple[float, float]
    over_plain: tuple[float, float, float]
    reported: str
    mfu: tuple[float, float]
    arms: str


def measure(name: str, package: str, precision: Precision, peak: float, small: bool) -> Measured:
    case = CASES[name]
    plain = PlainLoop(task(case, package, small))
    with FlopCounterMode(display=False) as counter:
        plain.step()
    plan = Plan(precision=precision)
    loop, found = settled_loop(lambda: task(case, package, small), plan, STEPS, 5.0 if small else SECONDS)
    seconds = bursts(plain, loop, rounds=2 if small else ROUNDS)
    tuning = found.tuning
    medians = tuple(statistics.median(side) for side in seconds)
    samples = 2 if small else case.batch
    loop.close()
    return Measured(
        model=name,
        package=package,
        precision=precision,
        settled=in_words(found.choices),
        is_settled=found.is_settled,
        steps=found.steps,
        samples_per_sec=(samples / medians[0], samples / medians[1]),
        over_plain=median_interval([a / b for a, b in zip(*seconds, strict=True)]),
        reported=str(tuning.whole.interval) if tuning.whole else "",
        mfu=(counter.get_total_flops() / medians[0] / peak, counter.get_total_flops() / medians[1] / peak),
        arms=tuning.table(),
    )


def bursts(plain: PlainLoop, other: PlainLoop, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a step of each, round by round, in an order that a coin decides."""
    coin = random.Random(0)
    spent: tuple[list[float], list[float]] = ([], [])
    for round_ in range(1 + rounds):  # the first warms up
        first = coin.randrange(2)
        for index in (first, 1 - first):
            seconds = timed(functools.partial(_burst, (plain, other)[index]))
            if round_:
                spent[index].append(seconds / BURST)
    return spent


def _burst(loop: PlainLoop) -> None:
    for _ in range(BURST):
        loop.step()


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the device, too, is done."""
    _synchronize()
    start = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matmul_flops_per_sec(small: bool) -> float:
    """What a large matrix product in bfloat16 reaches on this device: dense, the median of ten."""
    device, size = ("cuda" if torch.cuda.is_available() else "cpu"), 256 if small else 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = [timed(lambda: a @ b) for _ in range(15)][5:]
    return 2 * size**3 / statistics.median(seconds)


def row(run: Measured) -> list[str]:
    ratio, low, high = run.over_plain
    return [
        f"{run.model} ({run.package})",
        PRECISIONS[run.precision],
        run.settled,
        f"{run.steps}" if run.is_settled else f"not after {run.steps}",
        "{:,.0f} → {:,.0f}".format(*run.samples_per_sec),
        f"{ratio:.2f}x [{low:.2f}, {high:.2f}]",
        run.reported,
        "{:.1%} → {:.1%}".format(*run.mfu),
    ]


def main() -> None:
    args = arguments("Measure live trials on a GPU.").parse_args()
    if not is_possible(args):
        return
    peak = matmul_flops_per_sec(args.dry_run)
    rows = [["model", "", "settled", "after steps", "samples/s", "over plain", "by its own report", "MFU"]]
    runs: list[Measured] = []
    for name, precision in itertools.product(CASES, PRECISIONS):
        package = source(CASES[name])
        if package is None:
            print(f"{name}: left out, none of {', '.join(CASES[name].sources)} is installed", flush=True)
            continue
        start = time.perf_counter()
        runs.append(measure(name, package, precision, peak, args.dry_run))
        rows.append(row(runs[-1]))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"{' | '.join(rows[-1])}: {time.perf_counter() - start:.0f} s", flush=True)
    text = table(rows)
    print(f"\n{text}")
    heading = f"Live trials, plain → settled; MFU of {peak / 1e12:.0f} TFLOP/s, a product of matrices in bfloat16, on"
    write("tuning", args.out, {"matmul_tflops": peak / 1e12, "runs": [asdict(run) for run in runs]}, heading, text)


if __name__ == "__main__":
    main()
