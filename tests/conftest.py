"""What every test gets: an empty folder to run in, fixed seeds, a check that it leaves the process as it found it."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# pytest-xdist's workers take the processors between them: a second thread of one would only wait for another's.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# What one test compiles, another finds, unless torch is told to be on another processor: its look-up knows nothing of
# that. Tests of where kernels are kept remove the variable.
_KERNELS = f"lightning-accel-tests{os.environ.get('ATEN_CPU_CAPABILITY', '')}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), _KERNELS))

# Lightning says which devices it uses at every Trainer: nothing that a test could be judged by.
for _name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(_name).setLevel(logging.WARNING)

# Set by Lightning and torch themselves in the course of a normal run: taken back silently, so that no test sees
# another's. Every other variable that a test leaves behind is a leak.
_OTHERS_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER",  # by Lightning, before it asks NVML
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TRITON_PTXAS_PATH",
    "KINETO_LOG_LEVEL",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "OMP_NUM_THREADS",
    "KMP_DUPLICATE_LIB_OK",  # by scikit-learn, when it is imported
    "KMP_INIT_AT_FORK",
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    _with_a_purse(item.get_closest_marker("purse") is not None)
    _at_a_pace_of_one()
    if item.get_closest_marker("gpu") is not None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


_begins_plain: list[Any] = []  # the plugin's own


def _with_a_purse(has_purse: bool) -> None:
    """Has plans work from the first step on, as if the run could pay for every trial, or begin plain as a user's do.

    Tests train small models for a few steps, which a run of a user's would leave as they are. Those of the plain
    beginning itself are marked ``purse``. Not by a fixture: those of a module come before it.
    """
    plugin = sys.modules.get("lightning_accel.lightning.plugin")
    if plugin is not None:
        _begins_plain[:] = _begins_plain or [plugin.begins_plain]
        vars(plugin)["begins_plain"] = _begins_plain[0] if has_purse else lambda *_: False


def _at_a_pace_of_one() -> None:
    """Has estimates say the same on every machine: what a run can pay for follows from them."""
    for name in ("lightning.met_programs", "techniques.flash_attention.technique"):
        module = sys.modules.get(f"lightning_accel.{name}")
        if module is not None:
            vars(module)["python_pace"] = lambda: 1.0


def pytest_collection_finish() -> None:
    """Spares the tests what torch and Lightning do for others: a good part of their time in all.

    Every seed is noted down for GPUs that nobody has asked for yet, with the whole stack, once a kind of GPU; every
    graph that TorchDynamo captures flushes the processor's caches, to tell developers of torch what its guards cost;
    and every Trainer looks through all that is installed for callbacks of other packages.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        for gpus in (torch.cuda, torch.xpu, torch.mtia):
            gpus.manual_seed_all = lambda seed: None
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0
        logging.getLogger("torch.__trace").handlers.clear()  # structured traces, with nowhere to go
    installed = sys.modules.get("lightning.fabric.utilities.registry")
    if hasattr(installed, "entry_points"):
        installed.entry_points = functools.cache(installed.entry_points)


@pytest.fixture(autouse=True, scope="module")
def _without_what_was_before() -> None:
    """Spares the tests of a file looking through a million objects: those of imports, and of other files' tests.

    Collections do, and so does the search for optimizers that nobody has told of.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fails a test after which the process is not what it was before, and puts it right for the next one."""
    flags = _torch_flags()
    variables = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    leaks = _left_threads(threads) + _restored_variables(variables) + _restored_modes() + _restored_techniques()
    leaks += _restored_flags(flags) if flags else []
    if leaks:
        pytest.fail("this test leaks: " + "; ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run writes beside itself (checkpoints, logs) or remembers lands in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_ACCEL_CACHE", str(tmp_path / "remembered"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def determinism_restored() -> Iterator[None]:
    """For tests of ``Trainer(deterministic=True)``: Lightning switches torch over for good."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn_only)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn


@pytest.fixture
def techniques_restored() -> Iterator[None]:
    """For tests that declare a technique."""
    yield
    _restored_techniques()


@pytest.fixture
def make_trainer() -> Callable[..., Any]:
    """A Trainer on one CPU that writes nothing and prints nothing, with the options given on top."""
    from lightning.pytorch import Trainer

    def make(**options: Any) -> Trainer:
        quiet: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "max_epochs": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return Trainer(**{**quiet, **options})

    return make


def _flag_table(torch: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Every process-wide switch that code of this kind is tempted to touch: how to read it, how to set it back."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    table: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "deterministic algorithms": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (torch.get_default_device, torch.set_default_device),
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
        "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "attention fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
        "cudnn.benchmark": (lambda: cudnn.benchmark, lambda value: setattr(cudnn, "benchmark", value)),
        "cudnn.deterministic": (lambda: cudnn.deterministic, lambda value: setattr(cudnn, "deterministic", value)),
        "flash sdp": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "memory-efficient sdp": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "math sdp": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    }
    for device in ("cpu", "cuda"):
        table[f"autocast on {device}"] = (
            lambda device=device: torch.is_autocast_enabled(device),
            lambda value, device=device: torch.set_autocast_enabled(device, value),
        )
        table[f"autocast dtype on {device}"] = (
            lambda device=device: torch.get_autocast_dtype(device),
            lambda value, device=device: torch.set_autocast_dtype(device, value),
        )
    return table


def _torch_flags() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    return {name: read() for name, (read, _) in _flag_table(torch).items()} if torch else {}


def _restored_flags(before: dict[str, Any]) -> list[str]:
    leaks = []
    for name, (read, write) in _flag_table(sys.modules["torch"]).items():
        now = read()
        if now != before[name]:
            leaks.append(f"torch's {name} was {before[name]}, is {now}")
            write(before[name])
    return leaks


def _restored_techniques() -> list[str]:
    registry = sys.modules.get("lightning_accel.techniques.registry")
    declared = registry.declarations() if registry else {}
    foreign = [name for name, one in declared.items() if not one.technique.__module__.startswith("lightning_accel.")]
    for name in foreign:
        registry.forget(name)
    return [f"the technique {name!r}" for name in foreign]


def _restored_modes() -> list[str]:
    """Modes, hooks and groups that are in force in a torch nobody has touched: none."""
    if "torch" not in sys.modules:
        return []
    import torch
    from torch.nn.modules import module as hooks
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
    from torch.overrides import _get_current_function_mode_stack, _pop_mode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

    leaks = []
    while stack := _get_current_dispatch_mode_stack():
        leaks.append(f"an active dispatch mode, {stack[-1]!r}")
        _pop_dispatch_mode()
    while stack := _get_current_function_mode_stack():
        leaks.append(f"an active function mode, {stack[-1]!r}")
        _pop_mode()
    for name in vars(hooks):
        registry = getattr(hooks, name)
        if name.startswith("_global_") and name.endswith("_hooks") and isinstance(registry, dict) and registry:
            leaks.append(f"hooks on every module, torch.nn.modules.module.{name}")
            registry.clear()
    for registry in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        if registry:
            leaks.append("hooks on every optimizer")
            registry.clear()
    while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        leaks.append("default hooks on saved tensors")
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if torch.autograd._profiler_enabled():
        leaks.append("a running profiler")
        torch.autograd._disable_profiler_legacy()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        leaks.append("an open process group")
        torch.distributed.destroy_process_group()
    return leaks


def _restored_variables(before: dict[str, str]) -> list[str]:
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    changed.discard("PYTEST_CURRENT_TEST")  # pytest's own, which it is about to rewrite
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"the environment variable {name}" for name in sorted(changed - _OTHERS_VARIABLES)]


def _left_threads(before: set[threading.Thread]) -> list[str]:
    # Daemons of ours too: they are only so that one that waits for others cannot keep the interpreter from ending.
    left = [
        thread
        for thread in threading.enumerate()
        if thread not in before and (not thread.daemon or thread.name.startswith("lightning-accel"))
    ]
    for thread in left:
        thread.join(timeout=1.0)  # one that is just ending is no leak
    return [f"the running thread {thread.name}" for thread in left if thread.is_alive()]
