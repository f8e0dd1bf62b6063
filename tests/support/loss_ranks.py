"""A language model on two CPU processes under DistributedDataParallel, plain and with its loss in pieces.

Each rank fails where losses or averaged gradients differ.

Run by a test in a process of its own: python loss_ranks.py FOLDER
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_accel.techniques.loss import technique
from support.loss_models import VOCABULARY, LanguageModel, batches, of_handle, start
from support.strategies.forks import in_ranks

technique.FEWEST_CLASSES, technique.SMALLEST_BYTES = VOCABULARY, 0


def trained(model: nn.Module, *, setting: str, find_unused: bool) -> tuple[list[Tensor], int]:
    handle = start(model, loss=setting)
    parallel = DistributedDataParallel(model, find_unused_parameters=find_unused)
    results = []
    for tokens in batches(3):
        mine = tokens[dist.get_rank() :: 2]
        with handle.step():
            loss = F.cross_entropy(parallel(mine).view(-1, VOCABULARY), mine.roll(-1, 1).view(-1))
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        parallel.zero_grad()
    num_fused = 0 if setting == "off" else of_handle(handle).heads["head"].num_fused
    handle.undo()
    return results, num_fused


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ["LIGHTNING_ACCEL_CACHE"] = str(folder / f"cache{rank}")
    dist.init_process_group("gloo")
    for tied, find_unused in ((False, False), (True, False), (False, True)):
        torch.manual_seed(0)
        model = LanguageModel(tied=tied).double()
        twin = copy.deepcopy(model)
        expected, _ = trained(twin, setting="off", find_unused=find_unused)
        found, num_fused = trained(model, setting="auto", find_unused=find_unused)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
        # With unused parameters to be found DDP hands its output through a function of autograd's: logits are read.
        assert num_fused == (0 if find_unused else 3), (tied, find_unused, num_fused)
    dist.destroy_process_group()


if __name__ == "__main__":
    in_ranks(functools.partial(main, Path(sys.argv[1])), 2, patience_s=200)
