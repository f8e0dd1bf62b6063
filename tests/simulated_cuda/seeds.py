"""The names of ``torch.cuda.random``, and what seeds every device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from simulated_cuda.card import CARD
from simulated_cuda.events import device_index
from simulated_cuda.operations import GENERATORS


def _generator(device: Any) -> torch.Generator:
    return GENERATORS[device_index(device)]


def _seed_all(seed: int) -> None:
    for generator in GENERATORS:
        generator.manual_seed(int(seed) % 2**63)


def _set_state(state: torch.Tensor, device: Any = "cuda") -> None:
    _generator(device).set_state(state.cpu())


def _set_states(states: Any) -> None:
    for index, state in enumerate(states):
        _set_state(state, index)


NAMES = {
    "manual_seed": lambda seed: _generator(None).manual_seed(int(seed) % 2**63) and None,
    "manual_seed_all": _seed_all,
    "initial_seed": lambda: _generator(None).initial_seed(),
    "get_rng_state": lambda device="cuda": _generator(device).get_state(),
    "set_rng_state": _set_state,
    "get_rng_state_all": lambda: [generator.get_state() for generator in GENERATORS[: CARD.count]],
    "set_rng_state_all": _set_states,
}


@contextlib.contextmanager
def _fork_rng(
    devices: Any = None, enabled: bool = True, _caller: str = "", _devices_kw: str = "", device_type: str = "cuda"
) -> Iterator[None]:
    """As :func:`torch.random.fork_rng`."""
    if not enabled:
        yield
        return
    of_host, of_devices = torch.get_rng_state(), [generator.get_state() for generator in GENERATORS]
    try:
        yield
    finally:
        torch.set_rng_state(of_host)
        _set_states(of_devices)


_SEED_HOST = torch.manual_seed


def _manual_seed(seed: Any) -> torch.Generator:
    _seed_all(seed)
    return _SEED_HOST(seed)


def install() -> None:
    """Has torch seed the devices with the host, and keep their states with its own."""
    random: Any = torch.random
    random.fork_rng = _fork_rng
    torch.manual_seed = random.manual_seed = _manual_seed
