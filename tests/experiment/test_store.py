"""What outlives a run, in the user's cache folder: whole files, by key, of one version."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_accel.experiment.digest import digest
from lightning_accel.experiment.store import STORES, DamagedError, Store, cache_folder
from support.source_tree import library

KEY = {"model": "Net", "host": "a CPU"}
OTHER = {**KEY, "host": "another CPU"}


@pytest.fixture
def store() -> Store[list[int]]:
    return Store("tuning", lambda found: [int(one) for one in found["numbers"]])


def keep(store: Store[Any], key: dict[str, str] = KEY) -> Path:
    store.put(key, {"numbers": [1, 2]})
    (path,) = store.paths()
    return path


def test_a_user_without_a_home_has_a_folder_that_ends_with_the_process() -> None:
    """As in a container that runs under a user id of no account."""
    code = (
        "from lightning_accel.experiment.store import cache_folder as f; assert f() == f() and f().is_dir(); print(f())"
    )
    homeless = f"import pathlib\ndef home(): raise RuntimeError('no home')\npathlib.Path.home = home\n{code}"
    variables = {
        name: os.environ[name] for name in os.environ if name not in ("LIGHTNING_ACCEL_CACHE", "XDG_CACHE_HOME")
    }
    ran = subprocess.run([sys.executable, "-c", homeless], env=variables, check=True, capture_output=True, text=True)
    assert ran.stdout.strip()
    assert not Path(ran.stdout.strip()).exists()


def test_what_is_kept_comes_back_for_its_key_alone(store: Store[Any]) -> None:
    keep(store)
    entry = store.get(KEY)
    assert entry is not None
    assert (entry.key, entry.value) == (KEY, [1, 2])
    assert store.get(OTHER) is None
    assert Store("verdicts").get(KEY) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"key": {}}', "null", '{"version": 1, "key": {}, "written": "now"}']
)
def test_a_damaged_file_is_named_and_written_anew(store: Store[Any], content: str) -> None:
    path = keep(store)
    path.write_text(content)
    with pytest.raises(DamagedError, match=f"{path} is damaged"):
        store.get(KEY)
    assert [type(entry) for entry in store.entries()] == [DamagedError]
    keep(store)
    assert store.get(KEY) is not None


def test_a_value_that_its_user_cannot_read_is_damaged(store: Store[Any]) -> None:
    store.put(KEY, {"numbers": ["one"]})
    with pytest.raises(DamagedError, match="ValueError: invalid literal"):
        store.get(KEY)


def test_a_file_of_another_version_is_not_read(store: Store[Any]) -> None:
    keep(store)
    with pytest.raises(DamagedError, match="version 1, and not 2"):
        Store("tuning", version=2).get(KEY)


def test_a_file_of_another_key_is_not_taken_for_ones_own(store: Store[Any]) -> None:
    path = keep(store)
    path.write_text(json.dumps({**json.loads(path.read_text()), "key": OTHER}))
    with pytest.raises(DamagedError, match="another model or machine"):
        store.get(KEY)


def test_nothing_half_written_is_left_where_the_disk_is_full(store: Store[Any]) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            keep(store)
    assert not any(cache_folder().rglob("*.*"))


def test_a_folder_that_cannot_be_written_to_can_be_read(store: Store[Any]) -> None:
    cache_folder().touch()
    assert store.get(KEY) is None
    assert list(store.entries()) == []
    with pytest.raises(OSError, match="remembered"):
        keep(store)


def test_readers_see_whole_files_while_others_write(store: Store[Any]) -> None:
    with ThreadPoolExecutor(4) as pool:
        written = [pool.submit(store.put, KEY, {"numbers": [1, 2]}) for _ in range(50)]
        read = [pool.submit(store.get, KEY) for _ in range(50)]
    assert all(one.result() is None for one in written)
    assert all(entry is None or entry.value == [1, 2] for entry in (one.result() for one in read))
    assert len(list(store.paths())) == 1


def test_a_store_is_listed_and_cleared(store: Store[Any]) -> None:
    keep(store)
    store.put(OTHER, {"numbers": []})
    Store("verdicts").put(KEY, 1)
    assert sorted(len(entry.value) for entry in store.entries() if not isinstance(entry, DamagedError)) == [0, 2]
    assert store.clear() == 2
    assert not any(store.paths())
    assert any(Store("verdicts").paths())


def test_without_a_folder_of_its_own_it_is_the_users_cache(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("LIGHTNING_ACCEL_CACHE")
        environment.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_folder() == tmp_path / "lightning-accel"
        environment.delenv("XDG_CACHE_HOME")
        assert cache_folder() == Path.home() / ".cache" / "lightning-accel"


def test_a_digest_tells_parts_from_others() -> None:
    parts: list[tuple[Any, ...]] = [(), ("",), ("ab",), ("a", "b"), (b"ab",), (["a", "b"],), (1,), ("1",), ("\ud800",)]
    digests = {digest(*one) for one in parts}
    assert len(digests) == len(parts)
    assert {len(one) for one in digests} == {16}
    assert digest("a", 1) == digest("a", 1)


# -- who may do it by himself --------------------------------------------------------------------------------------


def test_every_store_is_listed_by_its_name() -> None:
    calls = [node for tree in library().trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [node.args[0] for node in calls if isinstance(node.func, ast.Name) and node.func.id == "Store"]
    assert {name.value for name in made if isinstance(name, ast.Constant)} == set(STORES)


def test_only_the_store_opens_files_of_the_cache_folder() -> None:
    """Nobody else is told where they are: users are told the folder's name, and compilers a folder in it."""
    names = {"cache_folder", "kernel_folder", "xla_folder"}
    users = {found.file for found in library().imports if found.name in names}
    assert users == {"cli/cache_command.py", "techniques/kernel_cache.py", "lightning/xla_plugin.py"}
    knows = {file for file, text in library().sources.items() if '"LIGHTNING_ACCEL_CACHE"' in text}
    assert knows == {"experiment/store.py"}


def test_only_the_digest_imports_hashlib() -> None:
    assert {found.file for found in library().imports if found.module == "hashlib"} == {"experiment/digest.py"}
