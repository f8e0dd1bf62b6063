"""A plugin of pytest's that puts AccelPlugin into every Trainer of Lightning's tests that has no precision of its own.

The Trainer is that of ``$SUITE_PACKAGE``. Beside that it leaves out what ``left_out.txt`` names, answers no question
for another host's address, and writes what became of each test to ``$SUITE_OUT``. ``$SUITE_SETTINGS`` are the plugin's,
as JSON; without it the tests run plain.
"""

from __future__ import annotations

import json
import os
import socket
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

PACKAGE = os.environ["SUITE_PACKAGE"]
_strategies = import_module(f"{PACKAGE}.strategies")
_AcceleratorConnector: Any = import_module(f"{PACKAGE}.trainer.connectors.accelerator_connector")._AcceleratorConnector
Precision = import_module(f"{PACKAGE}.plugins.precision").Precision
LEFT_OUT = Path(__file__).with_name("left_out.txt")
_THEIR_OWN = ("FSDPStrategy", "DeepSpeedStrategy", "SingleDeviceXLAStrategy", "XLAStrategy")
HAVE_THEIR_OWN = tuple(getattr(_strategies, name) for name in _THEIR_OWN)
HERE = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::", socket.gethostname()}

outcomes: dict[str, str] = {}


def put_in(settings: dict[str, Any]) -> None:
    """Has a Trainer take AccelPlugin where Lightning would take plain ``Precision`` and the user gave none."""
    from lightning_accel import AccelPlugin
    from lightning_accel.settings import Plan

    chosen = _AcceleratorConnector._check_and_init_precision

    def choose(self: Any) -> Any:
        precision = chosen(self)
        is_default = type(precision) is Precision and precision is not self._precision_plugin_flag
        return (
            AccelPlugin.from_plan(Plan().replace(**settings))
            if is_default and not isinstance(self.strategy, HAVE_THEIR_OWN)
            else precision
        )

    _AcceleratorConnector._check_and_init_precision = choose


def stay_here() -> None:
    """As where there is no network: a test that asks for something is to fail at once, and alike everywhere."""
    look_up = socket.getaddrinfo

    def look_up_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in HERE and not name.startswith("127."):
            raise socket.gaierror(socket.EAI_NONAME, f"no network in this suite: {name}")
        return look_up(host, *args, **kwargs)

    socket.getaddrinfo = look_up_here


def name_of(nodeid: str) -> str:
    return nodeid.rpartition("tests_pytorch/")[2]


def pytest_configure() -> None:
    stay_here()
    if (settings := os.environ.get("SUITE_SETTINGS")) is not None:
        put_in(json.loads(settings))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    # Before it is imported: it may need what is not installed.
    return True if is_left_out(name_of(collection_path.as_posix())) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    dropped = [item for item in items if is_left_out(name_of(item.nodeid))]
    items[:] = [item for item in items if item not in set(dropped)]
    config.hook.pytest_deselected(items=dropped)


def is_left_out(name: str) -> bool:
    lines = LEFT_OUT.read_text().splitlines()
    return name.startswith(tuple(line for line in lines if line and not line.startswith("#")))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of its three phases: a test that left something behind has passed, and fails all the same."""
    if report.failed or (report.skipped and not hasattr(report, "wasxfail")):
        outcomes[name_of(report.nodeid)] = report.outcome
    elif report.when == "call":
        outcomes[name_of(report.nodeid)] = "xfailed" if hasattr(report, "wasxfail") else report.outcome


def pytest_sessionfinish() -> None:
    Path(os.environ["SUITE_OUT"]).write_text(json.dumps(outcomes))
