"""Checks out another revision of the current repository elsewhere, temporarily."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from lightning_accel.core.checks import nearest

# Git sets these for its hooks. With them, a checkout would be written into the index of the working tree.
_OF_HOOKS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}


class RevisionError(ValueError):
    """A revision is not available. The message says why and what to do."""


@dataclass(frozen=True)
class Repository:
    """A git working tree."""

    root: Path  # its top folder

    @classmethod
    def around(cls, folder: Path) -> Repository:
        """Returns the repository that contains a folder.

        Raises:
            RevisionError: There is none.
        """
        return cls(Path(_git(folder, "rev-parse", "--show-toplevel")).resolve())

    def commit(self, revision: str) -> str:
        """Returns the full hash of a revision's commit.

        Raises:
            RevisionError: The revision does not exist.
        """
        try:
            return _git(self.root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        except RevisionError:
            names = _git(self.root, "for-each-ref", "--format=%(refname:short)").split()
            similar = next((f"; did you mean {name!r}?" for name in names if name.endswith(f"/{revision}")), "")
            raise RevisionError(
                f"{self.root} has no revision {revision!r}{similar or nearest(revision, names) or '.'} A clone of CI"
                " often holds one commit alone: fetch the other, too (actions/checkout: fetch-depth: 0)."
            ) from None

    def has_changes(self) -> bool:
        """Returns whether there are uncommitted changes, including new files."""
        return bool(_git(self.root, "status", "--porcelain"))

    @contextmanager
    def checked_out(self, commit: str, folder: Path, links: Sequence[Path] = ()) -> Iterator[None]:
        """Checks a commit out into a new folder, linked to files of the working tree. The folder is always removed.

        Raises:
            RevisionError: The checkout is impossible, or the commit has a file in place of a link.
        """
        try:
            # The user's hooks are for the user's working tree.
            _git(self.root, "-c", f"core.hooksPath={os.devnull}", "worktree", "add", "--detach", str(folder), commit)
            for link in links:
                self._link(link, folder)
            yield
        finally:
            # An unfinished cleanup would stay in the user's repository, so a second Ctrl-C must wait.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                if folder.exists():
                    _git(self.root, "worktree", "remove", "--force", "--force", str(folder))
            except RevisionError as error:
                shutil.rmtree(folder, ignore_errors=True)
                print(f"lightning-accel bench: {error} `git worktree prune` makes git forget it.", file=sys.stderr)
            finally:
                signal.signal(signal.SIGINT, before)

    def _link(self, link: Path, folder: Path) -> None:
        target = Path(os.path.abspath(link))  # links in the working tree are not resolved
        if not target.exists() or not target.is_relative_to(self.root) or target == self.root:
            raise RevisionError(f"--link {link}: there is no such file or folder in {self.root}.")
        place = folder / target.relative_to(self.root)
        if place.exists():
            raise RevisionError(f"--link {link}: the other revision has its own. Link what git does not know.")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target, target_is_directory=target.is_dir())

    def python_path(self, folder: Path) -> str:
        """Returns a PYTHONPATH by which the checkout's code is imported instead of the working tree's.

        Packages installed from the working tree (``pip install -e``) would be imported from there.
        """
        given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        # The first entry is the folder of this command.
        here = [Path(entry).resolve() for entry in (*given, *sys.path[1:], *_editable_projects()) if entry]
        there = [folder / entry.relative_to(self.root) for entry in here if entry.is_relative_to(self.root)]
        return os.pathsep.join(dict.fromkeys([*(str(entry) for entry in there if entry.is_dir()), *given]))


def _editable_projects() -> Iterator[str]:
    """Yields the folders of projects installed in this Python with ``pip install -e``."""
    for distribution in distributions():
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            yield url2pathname(urlparse(origin["url"]).path)


def _git(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise RevisionError("git is not installed, or not on the PATH.") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RevisionError(f"git {' '.join(arguments)}, in {folder}: {said[-1] if said else 'failed'}.")
    return done.stdout.strip()
