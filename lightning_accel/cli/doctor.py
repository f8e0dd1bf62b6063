"""This machine's features, what is missing and how to get it. Needs torch but not Lightning: answers in seconds."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Table

from lightning_accel.cli.command import console
from lightning_accel.cli.decisions import ExampleModel, forecasts
from lightning_accel.core.allocators import PACKAGES, installed_library, segment_settings
from lightning_accel.core.heap import heap_in_use
from lightning_accel.core.host import Host, usable_cores
from lightning_accel.settings import Plan
from lightning_accel.techniques.compilation import Compilation
from lightning_accel.techniques.flash_attention.backends import installed_backends
from lightning_accel.techniques.mixed_precision import resolve_precision

_PROJECT = "lightning-accel"
_PURPOSE = {
    "cli": "AccelCLI: runs configured in YAML",
    "tensorboard": "logs to look at in TensorBoard",
    "cuda12": "CuPy kernels and energy counters, CUDA 12",
    "cuda13": "CuPy kernels and energy counters, CUDA 13",
    "flash": "flash-attn's attention kernels",
    "deploy": "export to ONNX",
    "torchao": "float8 layers and optimizer states in 8 bits",
    "tensorrt": "export to TensorRT",
    "transformers": "Hugging Face models, whose attention is then found",
    "examples": "what the examples and the demo need",
    "report": "figures for a paper",
    "launchers": "runs under Ray Train, or handed in by submitit",
    "boards": "what looking at other loggers in a browser needs",
    "docs": "what building the documentation needs",
    "dev": "what working on lightning-accel needs",
}
_NVIDIA_ONLY = ("cuda12", "cuda13", "flash", "tensorrt")


@dataclass(frozen=True, kw_only=True)
class Extra:
    """One optional part of the package."""

    name: str  # as in `pip install 'lightning-accel[name]'`
    purpose: str  # what it is for
    # `"not for this machine"` if it is missing and would be useless here.
    state: Literal["ready", "missing", "not for this machine"]
    found: tuple[str, ...]  # the packages that are installed, with their versions
    wanting: tuple[str, ...]  # packages that are missing or too old, with their requirement

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install '{_PROJECT}[{self.name}]'"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings."""

    facts: dict[str, str]  # facts about the machine: title → value
    precision: tuple[str, str]  # what `precision="auto"` chooses here, and why
    extras: tuple[Extra, ...]  # the optional parts of the package, in the order of `pyproject.toml`
    advice: tuple[str, ...]  # how to make better use of this machine, one line each


def examine(host: Host | None = None) -> Diagnosis:
    """Examines this machine, or judges another ``host``."""
    host = host if host is not None else Host.detect()
    advice = list(_not_had(host))
    extras = tuple(_extras(host))
    if not extras:
        advice.append(f"{_PROJECT} runs straight from a checkout, so its extras are not known: pip install -e .")
    return Diagnosis(facts=_facts(host), precision=resolve_precision("auto", host), extras=extras, advice=tuple(advice))


def show(diagnosis: Diagnosis) -> None:
    """Prints the findings as two tables."""
    printed = console(200)
    machine = Table("this machine", "", show_header=True)
    for title, value in diagnosis.facts.items():
        machine.add_row(title, escape(value))
    precision, reason = diagnosis.precision
    machine.add_row("precision='auto'", escape(f"{precision}: {reason}"))
    printed.print(machine)
    if diagnosis.extras:
        printed.print(_extras_table(diagnosis.extras))
    for line in diagnosis.advice:
        printed.print(f"! {escape(line)}", soft_wrap=True)


def _not_had(host: Host) -> Iterator[str]:
    """Yields which settings a run here would not use, with advice if there is any."""
    if host.kind == "xla":
        yield (
            "Trainer: Lightning's strategies for XLA take no AccelPlugin: give them an AccelXLAPlugin, which has the"
            " same settings; lightning_accel.accelerate(model) is for a loop without Lightning"
        )
    for setting, said in forecasts(Plan(), host, ExampleModel()).items():
        is_a_fact = setting.startswith(("precision", "allocator"))  # in the table above
        if not said.acts and said.is_missed and not is_a_fact:
            yield f"{setting}: {said.words}"
    reason = Compilation("on").unavailable(host)
    if reason is not None:
        yield f"compile: {reason}"


def _extras_table(extras: tuple[Extra, ...]) -> Table:
    table = Table("extra", "for", "state", "packages", "get it with")
    colours = {"ready": "green", "missing": "yellow", "not for this machine": "dim"}
    for extra in extras:
        packages = [*extra.found, *(f"no {package}" for package in extra.wanting)]
        table.add_row(
            extra.name,
            extra.purpose,
            f"[{colours[extra.state]}]{extra.state}[/]",
            escape(", ".join(packages)),
            escape(extra.install) if extra.state == "missing" else "",
        )
    return table


def _facts(host: Host) -> dict[str, str]:
    is_known = host.kind in ("cuda", "rocm", "cpu")
    facts = {
        "device": host.described,
        "memory": _memory(host),
        "CPU cores": f"{usable_cores()} usable of {os.cpu_count() or 1}, torch computes on {torch.get_num_threads()}",
        "bfloat16": "fast" if host.native_bf16 else "not fast" if is_known else "not known",
        "compiler": host.compiler or "none",
        "allocator": _allocator(host),
        "attention backends": ", ".join(backend.name for backend in installed_backends(host)),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": platform.python_version(),
    }
    if host.arch:
        facts["architecture"] = host.arch
    if host.capability is not None:
        facts["compute capability"] = ".".join(str(part) for part in host.capability)
    for package in ("torch", "lightning", _PROJECT):
        facts[package] = _version(package) or "not installed"
    if torch.version.cuda is not None:
        facts["torch's CUDA"] = torch.version.cuda
    return facts


def _allocator(host: Host) -> str:
    """Describes the heap's library or the GPU allocator's settings, and the alternatives."""
    if host.kind == "cuda":
        own = ", ".join(f"{name}={value}" for name, value in segment_settings().items())
        return own or "segments that do not expand; `lightning-accel run` starts programs with such as do"
    found = [name for name in PACKAGES if installed_library(name)]
    words = [heap_in_use() or "of the system"]
    words += [f"{', '.join(found)} installed, which `lightning-accel run` tries"] if found else []
    missing = [f"{name} (apt-get install {package})" for name, package in PACKAGES.items() if name not in found]
    if missing and sys.platform == "linux" and host.kind == "cpu":
        words.append(f"not installed: {', '.join(missing)}")
    return "; ".join(words)


def _memory(host: Host) -> str:
    memory = psutil.virtual_memory()
    of_host = f"host {memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"
    if host.kind not in ("cuda", "rocm") or not torch.cuda.is_available():
        return of_host
    free, total = torch.cuda.mem_get_info()
    return f"device {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free; {of_host}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extras(host: Host) -> Iterator[Extra]:
    try:
        metadata = importlib.metadata.metadata(_PROJECT)
    except importlib.metadata.PackageNotFoundError:
        return
    for name in metadata.get_all("Provides-Extra") or []:
        found, wanting = [], []
        for requirement in _required_by(name, _PROJECT):
            version = _version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                has = "" if version is None else f" (has {version})"
                wanting.append(f"{requirement.name}{requirement.specifier}{has}")
            else:
                found.append(f"{requirement.name} {version}")
                parts = [part.name for inner in requirement.extras for part in _required_by(inner, requirement.name)]
                wanting += [part for part in parts if _version(part) is None]  # as of jsonargparse[signatures]
        yield Extra(
            name=name,
            purpose=_PURPOSE.get(name, ""),
            state="ready" if not wanting else "missing" if _suits(name, host) else "not for this machine",
            found=tuple(found),
            wanting=tuple(wanting),
        )


def _required_by(extra: str, package: str) -> Iterator[Requirement]:
    """Yields the requirements of a package's extra, including those of its extras that this one refers to."""
    for requirement in map(Requirement, importlib.metadata.requires(package) or []):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == package:
            for inner in sorted(requirement.extras):
                yield from _required_by(inner, package)
        else:
            yield requirement


def _suits(extra: str, host: Host) -> bool:
    cuda = (torch.version.cuda or "").partition(".")[0]
    is_for_another = cuda and extra.startswith("cuda") and extra != f"cuda{cuda}"
    return extra not in _NVIDIA_ONLY or (host.kind == "cuda" and not is_for_another)
