"""The digits example, configured in YAML with Lightning's own command line.

    python examples/digits_cli.py fit --config examples/config.yaml

The configuration names AccelPlugin among the Trainer's plugins. With ``AccelCLI`` in the place of ``LightningCLI``
(``from lightning_accel import AccelCLI``) its settings are a section ``accel:`` and flags such as
``--accel.precision=bf16-mixed`` instead.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

from digits import Digits, DigitsNet


def main() -> None:
    LightningCLI(DigitsNet, Digits, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
