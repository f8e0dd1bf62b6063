"""Makes what a release consists of, and tries it: ``make release``. It does everything but the upload.

    python release.py [--python 3.10,3.14]

From the last commit, whose tree has to be clean, a wheel and an sdist are built twice, and both times have to give the
same bytes. The wheel is installed in an empty environment of the oldest Python, the sdist in one of the newest, with
nothing but pip; there the command has to answer and a Trainer has to train. ``dist/`` then holds both files, their
SHA-256, and an SBOM (CycloneDX) of the environment of the newest Python.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

from versions import ROOT, found, tomllib

DIST = ROOT / "dist"
TRAINS = """
import torch, lightning_accel
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
Trainer(max_steps=20, plugins=[lightning_accel.AccelPlugin()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False).fit(BoringModel())
print(lightning_accel.__version__, torch.__version__)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a release, and install it on clean Pythons.")
    parser.add_argument("--python", default="3.10,3.14", help="for the wheel, and for the sdist (default: %(default)s)")
    wheels, sdists = parser.parse_args().python.split(",")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if problem := why_not(version):
        print(f"release: {problem}", file=sys.stderr)
        return 1
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        first, second = (built(Path(folder) / name) for name in ("first", "second"))
        for one, other in zip(first, second, strict=True):
            if one.read_bytes() != other.read_bytes():
                print(f"release: {one.name} is built otherwise each time", file=sys.stderr)
                return 1
        files = [path.rename(DIST / path.name) for path in first]
        for file, python in zip(files, (wheels, sdists), strict=True):
            print(f"== {file.name} on Python {python}", flush=True)
            has = installed(file, python, Path(folder) / python)
            subprocess.run([has, "-c", TRAINS], check=True, cwd=folder)
            subprocess.run([has.parent / "lightning-accel", "--version"], check=True, cwd=folder)
        bill = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
        subprocess.run([*bill, "--output-file", DIST / "sbom.cdx.json", has], check=True)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (DIST / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    print("".join(sums) + f"dist/ is ready. What is left is the upload: {' '.join(p.name for p in files)}")
    return 0


def why_not(version: str) -> str:
    """Why this tree is no release; empty if it is one."""
    if git("status", "--porcelain"):
        return "the tree has changes that are not committed"
    heading = re.search(rf"^## \[{re.escape(version)}\] - (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    return "" if heading else f"CHANGELOG.md has no section for {version}"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def built(folder: Path) -> list[Path]:
    """The wheel and the sdist of the last commit; every date in them is the commit's."""
    (folder / "tree").mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
        tree.extractall(folder / "tree", filter="data")
    date = git("log", "-1", "--format=%ct")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "tree"],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "SOURCE_DATE_EPOCH": date},
    )
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    dated(sdist, int(date))
    return [wheel, sdist]


def dated(sdist: Path, date: int) -> None:
    """Writes an sdist anew with one date and one owner: setuptools puts the time of the build into it."""
    with tarfile.open(sdist) as archive:
        entries = [(entry, archive.extractfile(entry)) for entry in sorted(archive.getmembers(), key=lambda e: e.name)]
        contents = [(entry, file.read() if file else b"") for entry, file in entries]
    with gzip.GzipFile(sdist, "wb", mtime=date) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for entry, content in contents:
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = date, 0, 0, "", ""
            entry.pax_headers = {}
            archive.addfile(entry, io.BytesIO(content))


def installed(file: Path, python: str, folder: Path) -> Path:
    """The interpreter of a new environment with the file and what pip chooses for it."""
    interpreter = found(python)
    if interpreter is None:
        raise SystemExit(f"release: there is no python{python} on the path or under pyenv; name others with --python")
    if interpreter == sys.executable:
        venv.create(folder, with_pip=True)
    else:
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
    has = folder / "bin" / "python"
    subprocess.run([has, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", file], check=True)
    return has


if __name__ == "__main__":
    raise SystemExit(main())
