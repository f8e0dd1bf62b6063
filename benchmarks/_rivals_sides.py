"""The sides of :mod:`rivals`: what runs each, and what it asks of a user who has a program of Lightning's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to train the same model.

    Attributes:
        title: In the table.
        function: That trains, as ``module.function`` of this folder.
        options: Of the function.
        imports: Packages that it cannot do without. They are imported before the clock starts.
        lines: Of the user's program that are new or changed, each as it is written.
        is_one_line: Whether it is advertised as one line.
        keeps_trainer: Whether the program is still one with Lightning's Trainer.
        checked: What the tool finds out by itself before it keeps a change.
        undone: What can be taken back, and how.
        setup_s: About how long it takes before the steps are fast, for the estimate.
        runs: How often the program runs, each finding the caches of the one before; the last is measured.
        by_default: Whether it is measured where nothing is said.
        why: It may not be there.
    """

    title: str
    function: str
    options: dict[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    is_one_line: bool = False
    keeps_trainer: bool = False
    checked: str = "nothing"
    undone: str = "by the user's hand"
    setup_s: float = 0.0
    runs: int = 1
    by_default: bool = True
    why: str = ""


COMPILES_S = 35.0
LIGHTNING = ("lightning.pytorch",)
ACCELERATED = (*LIGHTNING, "lightning_accel.lightning.plugin")  # as a program that begins with importing AccelPlugin
BF16 = 'Trainer(precision="bf16-mixed")'
COMPILE = "trainer.fit(torch.compile(module), loader)"
LOOP = (
    "net = net.to(device)",
    "optimizer = torch.optim.AdamW(net.parameters(), lr=LR)",
    "for inputs, labels in loader:",
    "inputs, labels = inputs.to(device), labels.to(device)",
    "optimizer.zero_grad()",
    "loss = loss_of(net(inputs), labels)",
    "loss.backward()",
    "optimizer.step()",
)
"""The least that takes the place of a Trainer; logs, checkpoints and validation are to be written, too."""

BY_THE_GUIDES = (
    "F.scaled_dot_product_attention(q, k, v, is_causal=True), in place of three lines of attention",
    "net = net.to(memory_format=torch.channels_last)",
    "inputs = inputs.contiguous(memory_format=torch.channels_last)",
    "AdamW(…, fused=True)",
)
BY_HAND = (*LOOP, *BY_THE_GUIDES, "with torch.autocast(device, torch.bfloat16):")
ACCELERATE = (
    "from accelerate import Accelerator",
    'accelerator = Accelerator(mixed_precision="bf16")',
    "optimizer = torch.optim.AdamW(net.parameters(), lr=LR)",
    "net, optimizer, loader = accelerator.prepare(net, optimizer, loader)",
    "for inputs, labels in loader:",
    "optimizer.zero_grad()",
    "loss = loss_of(net(inputs), labels)",
    "accelerator.backward(loss)",
    "optimizer.step()",
)
COMPILER_LEFT = "by the user's hand; the compiled wrapper renames the weights in a checkpoint"

ACCEL = Side(
    title="`AccelPlugin()`",
    function="_rivals_lightning.fit_accelerated",
    imports=ACCELERATED,
    lines=("Trainer(plugins=[AccelPlugin()])",),
    is_one_line=True,
    keeps_trainer=True,
    checked="numbers of each change but for bfloat16, and its speed by whole steps",
    undone="each change by itself while it trains, all of them at the end of the fit",
    setup_s=5.0,
)

SIDES = {
    "plain": Side(
        title="plain Lightning",
        function="_rivals_lightning.fit",
        imports=LIGHTNING,
        keeps_trainer=True,
        undone="nothing was done",
    ),
    "bf16": Side(
        title='Lightning, `precision="bf16-mixed"`',
        function="_rivals_lightning.fit",
        options={"precision": "bf16-mixed"},
        imports=LIGHTNING,
        lines=(BF16,),
        is_one_line=True,
        keeps_trainer=True,
    ),
    "compile": Side(
        title="Lightning, `torch.compile(module)`",
        function="_rivals_lightning.fit",
        options={"is_compiled": True},
        imports=LIGHTNING,
        lines=(COMPILE,),
        is_one_line=True,
        keeps_trainer=True,
        setup_s=COMPILES_S,
    ),
    "bf16-compile": Side(
        title="Lightning, both",
        function="_rivals_lightning.fit",
        options={"is_compiled": True, "precision": "bf16-mixed"},
        imports=LIGHTNING,
        lines=(BF16, COMPILE),
        keeps_trainer=True,
        setup_s=COMPILES_S,
    ),
    "lightning-hand": Side(
        title="Lightning, with an expert's changes",
        function="_rivals_lightning.fit_by_hand",
        imports=LIGHTNING,
        lines=(*BY_THE_GUIDES, BF16),
        keeps_trainer=True,
    ),
    "hand": Side(
        title="a loop by an expert's hand",
        function="_rivals_loops.by_hand",
        lines=BY_HAND,
    ),
    "hand-compile": Side(
        title="the same, compiled",
        function="_rivals_loops.by_hand",
        options={"is_compiled": True},
        lines=(*BY_HAND, "net = torch.compile(net)"),
        undone=COMPILER_LEFT,
        setup_s=COMPILES_S,
    ),
    "accelerate": Side(
        title='Accelerate, `mixed_precision="bf16"`',
        function="_rivals_loops.accelerate",
        imports=("accelerate",),
        lines=ACCELERATE,
    ),
    "accelerate-compile": Side(
        title="Accelerate, compiled as well",
        function="_rivals_loops.accelerate",
        options={"dynamo_backend": "inductor"},
        imports=("accelerate",),
        lines=ACCELERATE,
        undone="by the user's hand; `unwrap_model` takes the compiled wrapper off",
        setup_s=COMPILES_S,
        by_default=False,
    ),
    "transformers": Side(
        title="transformers' Trainer, `bf16=True`",
        function="_rivals_loops.transformers_trainer",
        imports=("transformers.trainer", "accelerate"),
        lines=(
            "from transformers import Trainer, TrainingArguments",
            "class WithLoss(nn.Module):",
            "def forward(self, inputs, labels):",
            'return {"loss": loss_of(self.net(inputs), labels)}',
            "collate_fn=lambda pair: dict(inputs=pair[0], labels=pair[1])",
            "arguments = TrainingArguments(output_dir, bf16=True, learning_rate=LR, …)",
            "trainer = Trainer(WithLoss(net), arguments, train_dataset=data)",
            "trainer.train()",
        ),
    ),
    "autotune": Side(
        title='pytorch-autotune, `budget="fast"`',
        function="_rivals_loops.autotune",
        imports=("pytorch_autotune",),
        lines=(
            "from pytorch_autotune import autotune",
            "result = autotune(net, batch, loss_fn=loss_of)",
            "for inputs, labels in loader:",
            "loss = result.step(inputs.to(device), labels.to(device))",
        ),
        is_one_line=True,
        checked="speed, by medians of 8 steps with a floor of 3%",
        undone="its trials; a batch that it was tuned with",
        setup_s=120.0,
        by_default=False,
        why="its trials are for CUDA devices",
    ),
    "composer": Side(
        title="Composer",
        function="_rivals_loops.composer",
        imports=("composer",),
        lines=(
            "from composer import Trainer",
            "class Model(ComposerModel):",
            "def forward(self, batch):",
            "return self.net(batch[0])",
            "def loss(self, outputs, batch):",
            "return loss_of(outputs, batch[1])",
            "trainer = Trainer(model=Model(), train_dataloader=loader, optimizers=…, algorithms=[…])",
            "trainer.fit()",
        ),
        undone="by the user's hand: algorithms change the model for good",
        why="0.32 wants torch below 2.7.1: --python composer=PATH of an environment of its own",
    ),
    "thunder": Side(
        title="Thunder",
        function="_rivals_loops.thunder",
        imports=("thunder",),
        lines=(*LOOP, "import thunder", "net = thunder.compile(net)"),
        is_one_line=True,
        undone="by the user's hand",
        setup_s=COMPILES_S,
        why="0.2.6 fails on torch 2.13 at Tensor.align_as: --python thunder=PATH of an environment of its own",
    ),
    "accel": ACCEL,
    "accel-again": replace(ACCEL, title="`AccelPlugin()`, the same program once more", runs=2),
    "accel-compile": replace(
        ACCEL,
        title='`AccelPlugin(compile="on")`',
        options={"compile": "on"},
        lines=('Trainer(plugins=[AccelPlugin(compile="on")])',),
        checked=f"{ACCEL.checked}, but for the compiler",
        setup_s=COMPILES_S,
    ),
}
PLAIN, OURS, AGAIN, EXPERT = "plain", "accel", "accel-again", "lightning-hand"
