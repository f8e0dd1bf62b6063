"""The heap keeps what a step frees, where steps ask the system for it again and again: counted in page faults."""

from __future__ import annotations

import itertools
import mmap
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel, build_context
from lightning_accel.core import heap
from lightning_accel.core.allocators import EXPANDABLE_SEGMENTS, segment_settings
from lightning_accel.core.heap import GLIBC, heap_in_use
from lightning_accel.core.host import Host
from lightning_accel.engine import Engine
from lightning_accel.techniques.allocator import AllocatorTechnique
from lightning_accel.techniques.arms import Arm
from support.simulated_hosts import SIMULATED_HOSTS

pytestmark = pytest.mark.skipif(heap_in_use() != GLIBC, reason="the heap of this process is not glibc's")

STEPS = 32
UNLUCKY = 3
"""The status of a process in whose heap a small piece lies above all that is free, so that nothing goes back."""

LOOP = f"""
import sys
import torch
from torch import nn
from lightning_accel import Plan, accelerate
from lightning_accel.core.heap import page_faults

torch.set_num_threads(1)

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for _ in range(24):
            x = (x * self.weight).tanh()
        return x.mean()

inputs = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
model, handle = Deep(), None

def step():
    before = page_faults()
    if handle is None:
        loss = model(inputs)
    else:
        with handle.step():
            loss = model(inputs)
    loss.backward()
    model.weight.grad = None
    return page_faults() - before, loss.item()

def counted(steps):
    return [step()[0] for _ in range(steps)]

def tell_steps(mode):
    counts, losses = zip(*(step() for _ in range({STEPS})))
    print(mode, "counts", *counts)
    print(mode, "losses", *losses)

tell_steps("plain")
model = Deep()
handle = accelerate(model, Plan(precision="32-true"), steps=0)
counted(8)
print("accelerated waiting", handle.report.refused("allocator")[""])
[arm] = handle.engine.arms()
if arm.asked_alone:
    sys.exit({UNLUCKY})
arm.choose("keep")
tell_steps("accelerated")
for choice in ("off", "keep"):
    arm.choose(choice)
    print("accelerated", choice, *counted(16))
report = handle.report.techniques["allocator"]
print("accelerated report", handle.report.of("allocator").status, report.changes[""])
handle.undo()
handle = None
print("accelerated after", *counted(4))
"""
PAGES_A_TENSOR = (1 << 20) // mmap.PAGESIZE


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What a plain loop and an accelerated one in a process of their own printed, by the first words of each line.

    Of a process whose heap happens to give little back without us there is nothing to tell: another one is asked.
    """
    script = tmp_path_factory.mktemp("loops") / "loop.py"
    script.write_text(LOOP, encoding="utf-8")
    for _ in range(40):
        command = [sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        off = re.search(r"^accelerated off (.*)$", done.stdout, re.MULTILINE)
        if done.returncode != UNLUCKY and (off is None or sum(counts(off[1])[8:]) > 12 * PAGES_A_TENSOR):
            break
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, dict[str, str]] = {"plain": {}, "accelerated": {}}
    for line in done.stdout.splitlines():
        mode, name, *said = line.split(" ", 2)
        told[mode][name] = said[0]
    return told


def counts(line: str) -> list[int]:
    return [int(count) for count in line.split()]


@pytest.mark.medium
def test_a_plain_step_asks_the_system_for_pages_that_the_one_before_gave_back(loops: dict[str, dict[str, str]]) -> None:
    assert sum(counts(loops["plain"]["counts"])[2:]) > PAGES_A_TENSOR


@pytest.mark.medium
def test_the_heap_is_left_alone_until_live_trials_put_the_arm_on(loops: dict[str, dict[str, str]]) -> None:
    assert loops["accelerated"]["waiting"].endswith("ms: only live trials switch it on")


@pytest.mark.medium
def test_once_it_is_on_most_steps_ask_for_less_than_a_quarter_of_a_tensor(loops: dict[str, dict[str, str]]) -> None:
    """Most: the heap may still grow by the gaps in it."""
    assert statistics.median(counts(loops["accelerated"]["counts"])[20:]) < PAGES_A_TENSOR / 4


@pytest.mark.medium
def test_numbers_stay_the_same_to_the_bit(loops: dict[str, dict[str, str]]) -> None:
    assert loops["accelerated"]["losses"] == loops["plain"]["losses"]


@pytest.mark.medium
def test_the_arm_takes_turns_with_the_heap_as_it_was(loops: dict[str, dict[str, str]]) -> None:
    off, keep = (counts(loops["accelerated"][choice])[8:] for choice in ("off", "keep"))
    assert statistics.median(keep) < statistics.mean(off) / 4


@pytest.mark.medium
def test_the_report_says_how_many_pages_a_step_had_asked_for(loops: dict[str, dict[str, str]]) -> None:
    assert re.fullmatch(
        r"in force .*a step asks the system for [\d,]+ pages, about [\d.]+ ms", loops["accelerated"]["report"]
    )


@pytest.mark.medium
def test_after_the_run_what_is_free_goes_back_to_the_system(loops: dict[str, dict[str, str]]) -> None:
    assert counts(loops["accelerated"]["after"])[0] > 24 * PAGES_A_TENSOR


PLAIN_BUT_THIS = Plan(
    precision="32-true", techniques={"flash_attention": "off", "inplace_activations": "off", "memory_format": "off"}
)


def steps(handle: AcceleratedModel, count: int = 12) -> None:
    for _ in range(count):
        with handle.step():
            loss = handle.model(torch.ones(2, 2)).sum()
        loss.backward()


def allocator_arm(handle: AcceleratedModel) -> Arm:
    [arm] = [arm for arm in handle.engine.arms() if arm.name == "allocator"]
    return arm


def test_a_model_whose_steps_ask_for_nothing_is_left_alone() -> None:
    handle = accelerate(nn.Linear(2, 2), Plan(trust="checked"))
    steps(handle)
    assert handle.report.applied("allocator") == []
    assert "nothing to gain" in handle.report.refused("allocator")[""]
    assert allocator_arm(handle).asked_alone
    handle.undo()


@pytest.mark.parametrize("pages", [0, 10_000])
def test_turns_are_counted_again_in_the_plan_that_is_left_at_the_end(
    monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    handle = accelerate(nn.Linear(2, 2), Plan(trust="checked"))
    steps(handle)
    asked = itertools.count(0, pages) if pages else itertools.repeat(0)
    monkeypatch.setattr(heap, "page_faults", lambda: next(asked))
    gain_ms = allocator_arm(handle).gain_ms
    assert [gain_ms() for _ in range(10)] == 10 * [None]
    assert gain_ms() == pages * heap.page_fault_ms()
    steps(handle, 1)
    reason = handle.report.refused("allocator")[""]
    assert reason.startswith(f"a turn asks the system for {pages:,} pages, ")
    assert reason.endswith("only live trials switch it on" if pages else "nothing to gain")
    handle.undo()


def test_no_process_is_started_to_tell_what_else_could_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``ctypes.util.find_library`` does, in the middle of a training."""
    asked = itertools.count(0, 10_000)
    monkeypatch.setattr(heap, "page_faults", lambda: next(asked))
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: pytest.fail(f"starts {arguments}"))
    handle = accelerate(nn.Linear(2, 2), Plan(trust="checked"))
    steps(handle)
    assert "jemalloc or tcmalloc" in handle.report.of("allocator").details
    handle.undo()


@pytest.mark.parametrize(
    ("variable", "value"), [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")]
)
def test_what_the_user_has_set_is_theirs(variable: str, value: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(variable, value)
        handle = accelerate(nn.Linear(2, 2), Plan(trust="checked"))
    assert handle.report.of("allocator").status == f"as {variable}={value} has it"
    handle.undo()


@pytest.mark.parametrize("settings", [{"memory_budget": "1GiB"}, {"activation_offloading": "disk"}])
def test_memory_that_has_to_go_back_to_the_system_is_not_kept(settings: dict[str, Any]) -> None:
    model, host = nn.Linear(2, 2), Host(kind="cpu", device_name="a CPU")
    around = build_context(Plan().replace(**settings), model, host, in_plain_loop=True)
    [technique] = [one for one in around.techniques if isinstance(one, AllocatorTechnique)]
    [name] = settings
    assert technique.unavailable(host) == f"not beside {name}, for which memory has to go back to the system"


def test_on_a_gpu_the_variable_is_named_that_has_to_be_there_before_cuda_starts() -> None:
    """Simulated: a model on the CPU under the plan of a host with a GPU."""
    with pytest.MonkeyPatch.context() as patched:
        for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            patched.delenv(variable, raising=False)
        handle = accelerate(nn.Linear(2, 2), PLAIN_BUT_THIS, host=SIMULATED_HOSTS["A100"])
        steps(handle)
        assert "`lightning-accel run`" in handle.report.refused("allocator")[""]
        handle.undo()
        patched.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
        handle = accelerate(nn.Linear(2, 2), PLAIN_BUT_THIS, host=SIMULATED_HOSTS["A100"])
        status = handle.report.of("allocator").status
        assert status == "as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False has it"
        handle.undo()


def test_what_is_held_beyond_the_peak_is_asked_of_the_runs_device_not_of_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, mebibytes in (("max_memory_reserved", 7), ("max_memory_allocated", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda index=None, mebibytes=mebibytes: (index == 1) * mebibytes << 20)
    model, host = nn.Linear(2, 2), SIMULATED_HOSTS["A100"]
    techniques = build_context(PLAIN_BUT_THIS, model, host, device=torch.device("cuda", 1)).techniques
    [technique] = [one for one in techniques if isinstance(one, AllocatorTechnique)]
    engine = Engine(model, host, [technique])
    for _ in range(6):
        with engine.step():
            model(torch.ones(2, 2)).sum().backward()
    assert engine.report.refused("allocator")[""].startswith("5.0 MiB of CUDA memory")


@pytest.mark.needs_kernels("a driver's virtual memory")
@pytest.mark.gpu
def test_segments_of_cuda_memory_expand_where_cuda_starts_so(tmp_path: Path) -> None:
    program = """
import sys
import torch
from lightning_accel import Plan, accelerate

model = torch.nn.Linear(2048, 2048, device="cuda")
handle = accelerate(model, Plan())
for _ in range(8):
    with handle.step():
        loss = model(torch.ones(64, 2048, device="cuda")).sum()
    loss.backward()
print(all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
print(handle.report.of("allocator").status)
handle.undo()
"""
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in segment_settings()}
    told = {}
    for name, variables in {"plain": {}, "expandable": EXPANDABLE_SEGMENTS}.items():
        command, env = [sys.executable, str(script)], {**environment, **variables}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
        told[name] = done.stdout.splitlines()
    assert told["plain"][0] == "False"
    assert "`lightning-accel run`" in told["plain"][1]
    assert told["expandable"] == ["True", "as PYTORCH_ALLOC_CONF=expandable_segments:True has it"]


@pytest.mark.medium
def test_what_is_kept_goes_back_where_it_is_much_more_than_a_step_takes() -> None:
    """Steps that are larger for a while, or that leave gaps, are not paid for until the run ends."""
    program = """
import psutil
import torch
from lightning_accel.techniques.allocator import HeapPatch

patch = HeapPatch(lambda: True)
patch.apply()
weights = torch.ones(512, 1 << 18)  # a tenth of which is more than pieces that lie otherwise take
for mebibytes in (8, 8, 8, 8, 512, 8, 8):
    patch.limit()
    torch.ones(mebibytes, 1 << 18)
    print(psutil.Process().memory_info().rss >> 20)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *_, small, large, after, later = map(int, done.stdout.split())
    assert large > small + 300  # what is free after it is kept …
    assert after < small + 100  # … and no step has taken as much that began with nothing free
    assert later < small + 100
