"""Whatever comes in the middle of a save, the checkpoint from before is whole."""

from __future__ import annotations

import io
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_accel.resilience import atomic_checkpoint
from lightning_accel.resilience.atomic_checkpoint import (
    AtomicCheckpointIO,
    begin_replacing,
    commit,
    discard,
    save_atomically,
)
from support.resilience.replacing import replacing_folder
from support.scripts import SUPPORT, run_script

pytest.importorskip("resource")  # of POSIX: how a disk is made full here


BESIDE: dict[str, set[str]] = {"file": set(), "folder": set(), "trainer": {"best.ckpt"}}

# Processes that end, or find the disk full, within a save


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the runs of ``interrupted_saves.py`` left their checkpoints."""
    folder = tmp_path_factory.mktemp("interrupted")
    run_script(SUPPORT / "resilience" / "interrupted_saves.py", folder)
    return folder


@pytest.mark.parametrize("how", ["ended", "full"])
@pytest.mark.parametrize("what", ["file", "folder", "trainer"])
def test_the_previous_checkpoint_is_whole(interrupted: Path, what: str, how: str) -> None:
    folder = interrupted / f"{what}, {how}"
    last = folder / "last.ckpt"
    now = last / "1.pt" if what == "folder" else last
    assert now.read_bytes() == (folder / "whole.pt").read_bytes()
    assert torch.load(now)
    if what == "folder":
        assert torch.load(last / "0.pt") == {"value": 1.0}


@pytest.mark.parametrize("what", ["file", "trainer"])
def test_a_full_disk_is_named_with_what_is_left(interrupted: Path, what: str) -> None:
    folder = interrupted / f"{what}, full"
    said = (folder / "said.txt").read_text()
    assert said.startswith("OSError: [Errno 27] File too large: the checkpoint was not written (")
    assert said.endswith(f"B free there), the previous checkpoint is whole: '{folder}/last.ckpt'")


@pytest.mark.parametrize("what", ["file", "folder", "trainer"])
def test_a_save_that_fails_leaves_nothing_behind(interrupted: Path, what: str) -> None:
    names = {path.name for path in (interrupted / f"{what}, full").iterdir()}
    assert names == {"last.ckpt", "whole.pt", "said.txt", *BESIDE[what]}


@pytest.mark.parametrize("what", ["file", "folder", "trainer"])
def test_what_a_process_that_ended_left_is_hidden_and_goes_with_the_next_save(interrupted: Path, what: str) -> None:
    folder = interrupted / f"{what}, ended"
    names = {"last.ckpt", "whole.pt", *BESIDE[what]}
    (left,) = set(os.listdir(folder)) - names  # the save was under way
    assert left.startswith(".last.ckpt.")
    assert not left.endswith(".ckpt")
    save_atomically({"a": 3}, folder / "last.ckpt")
    assert set(os.listdir(folder)) == names
    assert torch.load(folder / "last.ckpt") == {"a": 3}


# Files


def test_a_save_that_raises_leaves_the_previous_checkpoint_and_the_error(tmp_path: Path) -> None:
    save_atomically({"a": 1}, tmp_path / "last.ckpt")
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        save_atomically({"a": lambda: 2}, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt") == {"a": 1}
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_an_error_of_the_users_own_is_not_taken_for_one_of_the_disk(tmp_path: Path) -> None:
    class ReadsAFile:
        def __reduce__(self) -> Any:
            return open("missing.txt")

    with pytest.raises(FileNotFoundError, match=r"No such file or directory: 'missing\.txt'"):
        save_atomically(ReadsAFile(), tmp_path / "last.ckpt")


def test_a_checkpoint_has_the_permissions_that_a_plain_save_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_atomically({}, tmp_path / "last.ckpt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "last.ckpt").stat().st_mode) == 0o640


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    save_atomically({"a": 1}, tmp_path / "elsewhere" / "epoch=1.ckpt")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "elsewhere" / "epoch=1.ckpt")
    save_atomically({"a": 2}, tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").is_symlink()
    assert torch.load(tmp_path / "elsewhere" / "epoch=1.ckpt") == {"a": 2}


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    """As ``/dev/null`` is, which root would have made a file of."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    save_atomically({"a": 1}, tmp_path / "pipe")
    assert torch.load(io.BytesIO(os.read(reader, 1 << 16))) == {"a": 1}
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_save_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    own = begin_replacing(tmp_path / "last.ckpt").name
    others = {own.replace(str(os.getpid()), str(os.getppid())), own.replace(str(os.getpid()), "notes")}
    others |= {".last.ckpt.another-host.1.tmp", ".first.ckpt.tmp"}
    for name in others:
        (tmp_path / name).touch()
    save_atomically({}, tmp_path / "last.ckpt")
    assert set(os.listdir(tmp_path)) == {"last.ckpt", *others}


def test_names_as_metrics_make_them(tmp_path: Path) -> None:
    name = f"val[2]={'x' * 230}.ckpt"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own = begin_replacing(tmp_path / name)
    own.with_name(own.name.replace(str(os.getpid()), str(ended.pid))).touch()
    save_atomically({"a": 1}, tmp_path / name)
    assert os.listdir(tmp_path) == [name]


# Folders


def write_folder(path: Path, value: str) -> None:
    with replacing_folder(path) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "0").write_text(value)


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with replacing_folder(tmp_path / "last.ckpt") as folder:
        (folder / "0").write_text("new")
        assert not (tmp_path / "last.ckpt").exists()
    assert (tmp_path / "last.ckpt" / "0").read_text() == "new"


@pytest.fixture(params=["exchanged in one step", "renamed one after the other"])
def way_to_swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "exchanged in one step":
        monkeypatch.setattr(atomic_checkpoint, "_exchange", lambda one, other: False)


@pytest.mark.usefixtures("way_to_swap")
@pytest.mark.parametrize("before", ["file", "folder", "nothing"])
@pytest.mark.parametrize("after", ["file", "folder"])
def test_files_and_folders_replace_each_other(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "last.ckpt"
    if before != "nothing":
        write_folder(path, "old") if before == "folder" else save_atomically("old", path)
    write_folder(path, "new") if after == "folder" else save_atomically("new", path)
    now: Any = (path / "part" / "0").read_text() if after == "folder" else torch.load(path)
    assert now == "new"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_linux_exchanges_folders_in_one_step(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("other systems have no such call")
    write_folder(tmp_path / "a", "a")
    save_atomically("b", tmp_path / "b")
    assert atomic_checkpoint._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "part" / "0").read_text() == "a"
    assert torch.load(tmp_path / "a") == "b"


@pytest.mark.usefixtures("way_to_swap")
@pytest.mark.parametrize("when", ["before it is on the disk", "after it is on the disk"])
def test_a_folder_that_cannot_be_put_in_place_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    write_folder(tmp_path / "last.ckpt", "old")
    if when == "after it is on the disk":
        monkeypatch.setattr(atomic_checkpoint, "_flush", lambda *paths: None)
    with pytest.raises(OSError, match="No such file"), replacing_folder(tmp_path / "last.ckpt") as folder:
        discard(folder)  # as if somebody had cleaned up
    assert (tmp_path / "last.ckpt" / "part" / "0").read_text() == "old"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_block_that_raises_leaves_the_previous_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "last.ckpt", "old")

    def write_half() -> None:
        with replacing_folder(tmp_path / "last.ckpt") as folder:
            (folder / "0").write_text("half")
            raise RuntimeError("user's own")

    with pytest.raises(RuntimeError, match="user's own"):
        write_half()
    assert (tmp_path / "last.ckpt" / "part" / "0").read_text() == "old"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_the_next_save_puts_back_what_was_aside_when_a_process_ended_between_two_renames(tmp_path: Path) -> None:
    write_folder(tmp_path / "last.ckpt", "old")
    aside = begin_replacing(tmp_path / "last.ckpt").with_suffix(".previous")
    (tmp_path / "last.ckpt").rename(aside)
    begin_replacing(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt" / "part" / "0").read_text() == "old"


def test_the_steps_can_be_taken_one_by_one(tmp_path: Path) -> None:
    folder = begin_replacing(tmp_path / "new" / "last.ckpt")
    folder.mkdir()
    (folder / "0").write_text("of rank 0")
    (folder / "1").write_text("of rank 1")
    commit(folder, tmp_path / "new" / "last.ckpt")
    assert sorted(os.listdir(tmp_path / "new" / "last.ckpt")) == ["0", "1"]


# The plugin


def test_a_trainer_writes_through_it(tmp_path: Path, make_trainer: Any) -> None:
    trainer: Trainer = make_trainer(plugins=[AtomicCheckpointIO()])
    path = tmp_path / "a" / "b.ckpt"
    trainer.strategy.checkpoint_io.save_checkpoint({"a": 1}, f"file://{path}")
    assert trainer.strategy.checkpoint_io.load_checkpoint(path) == {"a": 1}


def test_paths_that_are_not_local_are_left_to_lightning() -> None:
    io = AtomicCheckpointIO()
    io.save_checkpoint({"a": 1}, "memory://folder/last.ckpt")
    assert io.load_checkpoint("memory://folder/last.ckpt") == {"a": 1}
    assert not Path("memory:").exists()


def test_storage_options_are_refused_as_by_lightning(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt", storage_options={})
