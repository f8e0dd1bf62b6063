"""``lightning-accel cache``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_accel.__main__ import main
from lightning_accel.experiment.pair_test import RatioInterval
from lightning_accel.experiment.store import Store, cache_folder, kernel_folder, xla_folder
from lightning_accel.tuning.comparison import Result
from lightning_accel.tuning.tuning_result import Tuning
from lightning_accel.tuning.verdict_cache import TUNINGS, run_key

WHOLE = Result("whole plan", "faster", RatioInterval(1.31, 1.27, 1.35), 24)


def remember() -> None:
    tuning = Tuning({"flash_attention": "on"}, {"whole plan": WHOLE}, WHOLE, is_settled=True)
    TUNINGS.put(run_key(nn.Linear(4, 2), torch.zeros(8, 4), "a CPU"), tuning.to_dict())


def test_an_empty_cache_says_where_it_would_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"nothing is remembered in {cache_folder()}\n"


def test_what_is_remembered_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    remember()
    main(["cache"])
    text = capsys.readouterr().out
    assert all(part in text for part in ("Linear", "flash_attention=on", "1.31x [1.27, 1.35]", "a CPU", "torch"))


def test_a_damaged_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    remember()
    (path,) = TUNINGS.paths()
    path.write_text("{")
    main(["cache"])
    assert f"! {path} is damaged" in capsys.readouterr().out


def test_all_of_it_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    remember()
    main(["cache", "--clear"])
    assert capsys.readouterr().out == f"removed from {cache_folder()}: 1\n"
    assert not any(TUNINGS.paths())


@pytest.mark.parametrize(
    ("folder", "said"),
    [(kernel_folder, "compiled kernels (compile)"), (xla_folder, "compiled programs (XLA)")],
    ids=["kernels", "XLA"],
)
def test_what_was_compiled_is_listed_by_its_size_and_removed(
    folder: Callable[[], Path], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder() / "within").mkdir(parents=True)
    (folder() / "within" / "one").write_bytes(bytes(2048))
    main(["cache"])
    assert capsys.readouterr().out == f"{said}: 2.0 KiB in {folder()}\n"
    main(["cache", "--clear"])
    assert "removed from" in (text := capsys.readouterr().out)
    assert text.endswith(f": 0, and 2.0 KiB of {said.partition(' (')[0]}\n")
    assert not folder().exists()


@pytest.mark.parametrize(("name", "said"), [("verdicts", "trials"), ("searches", "tune"), ("allocators", "run")])
def test_what_else_is_kept_is_counted_and_removed(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Store(name).put({"model": "Net"}, {})
    main(["cache"])
    assert said in (text := capsys.readouterr().out)
    assert text.endswith(": 1\n")
    main(["cache", "--clear"])
    assert capsys.readouterr().out.endswith(": 1\n")
    assert not any(Store(name).paths())
