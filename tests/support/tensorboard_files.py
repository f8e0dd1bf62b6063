"""What TensorBoard reads of the files of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def events(folder: str | Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def hparams_of(folder: str | Path) -> dict[str, Any]:
    """The settings that TensorBoard's HParams tab shows for a run; empty where it shows none."""
    from tensorboard.plugins.hparams import metadata

    content = events(folder).summary_metadata.get(metadata.SESSION_START_INFO_TAG)
    if content is None:
        return {}
    hparams = metadata.parse_session_start_info_plugin_data(content.plugin_data.content).hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()}
