"""What a stranger gets: from the wheel, from ``import lightning_accel`` and from make."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import lightning_accel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools would put whatever an earlier build left in build/ into the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    for name in ("lightning_accel", "callbacks", "benchmarks/claims"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        "dist",
        ".",
        cwd=folder,
    )
    (built,) = (folder / "dist").glob("lightning_accel-*.whl")
    return built


@pytest.mark.medium
def test_the_wheel_holds_every_file_of_the_source_tree(wheel: Path) -> None:
    """Packages are listed by hand in pyproject.toml: this is what fails when one is forgotten there."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "lightning_accel"
    sources = [one for ending in ("py", "pyi", "cu", "j2", "json") for one in package.rglob(f"*.{ending}")]
    expected = {source.relative_to(ROOT).as_posix() for source in sources}
    for folder in ("callbacks", "benchmarks/claims"):
        elsewhere = ROOT / folder
        expected |= {
            f"lightning_accel/{elsewhere.name}/{source.relative_to(elsewhere).as_posix()}"
            for source in elsewhere.rglob("*.py")
        }
    expected.add("lightning_accel/py.typed")
    assert packed == expected


# One interpreter for several tests: to import Lightning takes ten seconds. Ours is first, as it may be in a program.
USED = """
import json, sys
import lightning_accel
import lightning.pytorch.strategies as home
import lightning_accel.callbacks, lightning_accel.lightning.plugin, torch
lightning_accel.AccelPlugin()
print(json.dumps({
    "files": [lightning_accel.callbacks.__file__, lightning_accel.lightning.plugin.__file__],
    "loader": type(home.__loader__).__name__,
    "is_the_specs": home.__spec__.loader is home.__loader__,
    "strategies": [name for name in home.StrategyRegistry.available_strategies() if name.startswith("accel")],
    "gpu_is_awake": torch.cuda.is_initialized(),
}))
"""


@pytest.fixture(scope="module")
def used(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program sees in a virtual environment into which the wheel was installed, and from another folder."""
    folder = tmp_path_factory.mktemp("used")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # The dependencies come from the environment of this test: torch alone would be gigabytes. A .pth file adds the
    # folder without reading the .pth files in it, so the editable install there stays out of it.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    said: dict[str, Any] = json.loads(run(python, "-W", "ignore", "-c", USED, cwd=elsewhere).splitlines()[-1])
    return {**said, "site_packages": site_packages}


@pytest.mark.slow
def test_the_wheel_installs_and_imports_from_another_folder(used: dict[str, Any]) -> None:
    assert all(Path(file).is_relative_to(used["site_packages"]) for file in used["files"])


@pytest.mark.slow
def test_strategies_are_registered_when_lightning_is_imported_later(used: dict[str, Any]) -> None:
    """And Lightning's module is loaded as it would be without us."""
    assert used["strategies"] == ["accel", "accel_ddp", "accel_fsdp"]
    assert (used["loader"], used["is_the_specs"]) == ("SourceFileLoader", True)


@pytest.mark.slow
def test_using_the_package_does_not_wake_the_gpu(used: dict[str, Any]) -> None:
    assert not used["gpu_is_awake"]


def test_import_is_quick_and_touches_nothing() -> None:
    code = "import sys, lightning_accel; print(*sys.modules)"
    loaded = set(run(sys.executable, "-c", code).split())
    assert not loaded & {"torch", "lightning", "lightning.pytorch", "numpy", "yaml", "rich", "jsonargparse", "cupy"}


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = (
        project["dependencies"]
        + extras["cli"]
        + extras["tensorboard"]
        + extras["examples"]
        + extras["docs"]
        + extras["dev"]
    )
    names = {canonical(Requirement(line).name) for line in asked} - {"lightning-accel"}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = [Requirement(line) for line in lines]
    assert names <= {canonical(pin.name) for pin in pins}
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    # Exactly one pin of each for every Python there is.
    for python in ("3.10", "3.11", "3.14"):
        valid = [p.name for p in pins if p.marker is None or p.marker.evaluate({"python_version": python})]
        assert len(valid) == len(set(valid))


def test_make_lists_its_targets() -> None:
    listed = make("help", check=True).stdout
    for target in (
        "demo",
        "test",
        "lint",
        "types",
        "docs",
        "format",
        "bench",
        "gpu",
        "test-slow",
        "test-cpus",
        "clean",
    ):
        assert f"make {target} " in listed


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (None, "is not here. Install Python 3.10 or newer"),
        ('case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac', "Python 3.9.2 is too old, 3.10 is needed"),
    ],
)
def test_make_says_which_python_it_needs(tmp_path: Path, script: str | None, complaint: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "some-python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    done = make("test", f"PYTHON={python}", folder=tmp_path)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert not (tmp_path / ".venv").exists()


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make(*arguments: str, folder: Path = ROOT, check: bool = False) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return subprocess.run(["make", "-C", str(folder), *arguments], capture_output=True, text=True, check=check)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_a_clone_that_is_not_installed_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "lightning_accel").symlink_to(ROOT / "lightning_accel")
    paths = [str(tmp_path), sysconfig.get_path("purelib")]
    code = f"import sys; sys.path[:0] = {paths}; import lightning_accel"
    done = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=False)
    assert f"ImportError: {tmp_path} is a clone that is not installed: pip install {tmp_path}" in done.stderr


def test_the_command_tells_its_version() -> None:
    said = run(sys.executable, "-m", "lightning_accel", "--version")
    assert said.strip() == f"lightning-accel {lightning_accel.__version__}"
