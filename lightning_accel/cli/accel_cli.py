"""`AccelCLI`: Lightning's command line with an ``accel:`` section. Needs ``pip install 'lightning-accel[cli]'``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from lightning_utilities.core.imports import RequirementCache
from typing_extensions import Self, override

from lightning_accel.arguments import DEFAULTS, written
from lightning_accel.cli.tune_command import TunableTrainer, TuneOptions, check_out, places_in, with_sections
from lightning_accel.core.atomic_write import write_whole
from lightning_accel.core.checks import nearest
from lightning_accel.core.host import Host
from lightning_accel.core.patch import temporarily
from lightning_accel.lightning.packages import (
    LightningArgumentParser,
    LightningCLI,
    LightningDataModule,
    LightningModule,
    Precision,
    SingleDeviceXLAStrategy,
    Strategy,
    StrategyRegistry,
    Trainer,
    XLAAccelerator,
    XLAStrategy,
    in_order_of,
    in_use,
    own,
    package_of,
)
from lightning_accel.lightning.parser_errors import complain
from lightning_accel.lightning.plugin import AccelPlugin
from lightning_accel.lightning.private import parser_actions
from lightning_accel.lightning.xla_plugin import AccelXLAPlugin
from lightning_accel.search.tune import tune
from lightning_accel.settings import Plan
from lightning_accel.techniques.registry import declarations

_XLA = ("xla", "single_xla")
# Lightning's strategies that accept only their own precision plugins: name prefix → what to use instead.
_INSTEAD = {
    ("fsdp",): "use trainer.strategy=accel_fsdp, which shards parameters, gradients and optimizer state too.",
    ("deepspeed",): "use trainer.strategy=accel_fsdp, which shards what ZeRO's third stage does.",
}
_TRAINER_CLASS = 4  # its position among LightningCLI's arguments
_JSONARGPARSE = RequirementCache("jsonargparse[signatures]>=4.35,<5")
# Jsonargparse's messages about an unknown key: in a section, in a section of a subcommand (with the section's name
# before it), on the command line.
_UNKNOWN = re.compile(
    r"(?:Group '(?P<group>[^']+)'|Subcommand '[^']+') does not accept option '(?P<key>[^']+)'"
    r"|unrecognized arguments: --(?P<flag>[^\s=]+)"
)


class AccelArgumentParser(LightningArgumentParser):
    """Lightning's parser, with the nearest setting in errors about misspelt ones."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        hint = _hint(message, _setting_names(self))
        if hint or message.startswith("accel: "):
            complain(self, message + hint)
        super().error(message, ex)


class AccelCLI(LightningCLI):
    """:class:`~lightning.pytorch.cli.LightningCLI` whose Trainer runs with an ``AccelPlugin``.

    Under XLA it is an ``AccelXLAPlugin``. The plugin's settings are the ``accel:`` section of the configuration, and
    flags such as ``--accel.precision=bf16-mixed``. Both accept what :class:`~lightning_accel.Plan` accepts, and the
    section is valid as a plan's YAML. An additional subcommand, ``tune``, finds the fastest settings before a run, and
    writes them into a configuration that is passed after the run's own. Its options are a section ``tuning:``, or flags
    such as ``--time 3min``. Everything else is as in Lightning, including subclassing: an override of
    :meth:`add_arguments_to_parser` need not call this one. With your own ``trainer_class`` there is ``tune`` if that
    class is a :class:`~lightning_accel.cli.tune_command.TunableTrainer`.

    Raises:
        ModuleNotFoundError: jsonargparse is missing.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        given = [package for thing in (*args, *kwargs.values()) if (package := package_of(thing)) is not None]
        cli: Self = super().__new__(in_order_of(given[0] if given else in_use(), cls))
        return cli

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not _JSONARGPARSE:
            raise ModuleNotFoundError(
                f"{type(self).__name__} reads its configuration with jsonargparse, which is not usable here:"
                f" pip install 'lightning-accel[cli]'. ({_JSONARGPARSE})"
            )
        package = package_of(self) or in_use()
        kwargs.setdefault("parser_class", in_order_of(package, AccelArgumentParser))
        if len(args) <= _TRAINER_CLASS:
            kwargs.setdefault("trainer_class", in_order_of(package, TunableTrainer))
        super().__init__(*args, **kwargs)

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        known = super().subcommands()
        return {**known, "tune": {"model", "datamodule"}} if hasattr(self.trainer_class, "tune") else known

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        given = sys.argv if args is None else args
        if not isinstance(given, list) or "tune" not in given:
            super().parse_arguments(parser, args)
            return
        given = with_sections(given)
        with temporarily(lambda: sys.argv, partial(setattr, sys, "argv"), given if args is None else sys.argv):
            super().parse_arguments(parser, None if args is None else given)

    def tune(self, model: LightningModule, datamodule: LightningDataModule | None = None, **not_read: Any) -> None:
        """Runs the subcommand ``tune``."""
        config = self.config[str(self.subcommand)]
        options = TuneOptions(**config["tuning"].as_dict())
        try:
            out = check_out(options.out)
            result = tune(
                model,
                datamodule,
                self.trainer,
                time=options.time,
                objective=options.objective,
                memory_limit=options.memory_limit,
                keep_effective_batch=options.keep_effective_batch,
                places=places_in(config),
            )
            has_answer = result.has_compared or result.has_changes
            if has_answer:
                write_whole(out, result.to_yaml())
        except (ValueError, OSError) as error:
            self.parser.error(f"tune: {error}")
        print(result)
        print(f"{out} is written: fit --config ... --config {out}" if has_answer else f"{out} is not written.")

    @override
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
        # The plan instead of the plugin, since descriptions of its attributes become the help texts. `plan` creates it,
        # because jsonargparse's traceback would hide the error message.
        parser.add_class_arguments(Plan, "accel", instantiate=False)
        if hasattr(self.trainer_class, "tune"):
            parser.add_class_arguments(TuneOptions, "tuning", instantiate=False)

    @property
    def plan(self) -> Plan:
        """The settings of the ``accel:`` section."""
        section = self._section(self.config, "accel")
        try:
            return Plan.from_dict(section.as_dict())
        except (TypeError, ValueError) as error:
            self.parser.error(f"accel: {error}")

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        # Finds contradictory settings before the model is built.
        _ = self.plan

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = {**self._section(self.config_init, "trainer"), **kwargs}
        plugins = config.get("plugins") or []
        plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
        self._check_no_other_precision(config.get("precision"), plugins)
        self._check_strategy(config.get("strategy"))
        is_for_xla = _is_for_xla(config.get("strategy"), config.get("accelerator"))
        kind: type[AccelPlugin] | type[AccelXLAPlugin] = AccelXLAPlugin if is_for_xla else AccelPlugin
        try:
            plugin = kind.from_plan(self.plan)
        except (ModuleNotFoundError, ValueError) as error:
            self.parser.error(f"accel: {error}")
        return super().instantiate_trainer(**{**kwargs, "plugins": [*plugins, plugin]})

    def _check_no_other_precision(self, precision: Any, plugins: list[Any]) -> None:
        if precision is not None:
            self.parser.error(
                f"trainer.precision={precision!r} and accel.precision={self.plan.precision!r} both decide on the"
                " precision: remove trainer.precision, and set accel.precision to what you want."
            )
        for plugin in plugins:
            if isinstance(plugin, AccelPlugin | AccelXLAPlugin):
                self.parser.error(
                    f"trainer.plugins has an {type(plugin).__name__} and {type(self).__name__} adds one from the"
                    " accel: section: move its init_args there, and remove it from trainer.plugins."
                )
            if isinstance(plugin, Precision):
                self.parser.error(
                    f"trainer.plugins has {type(plugin).__name__} and accel.precision={self.plan.precision!r}:"
                    " a Trainer takes one precision plugin. Remove the one in trainer.plugins."
                )

    def _check_strategy(self, strategy: Any) -> None:
        if not isinstance(strategy, str) or strategy == "auto":
            return
        known = own(self, StrategyRegistry).available_strategies()
        if strategy.lower() not in known:
            self.parser.error(f"trainer.strategy={strategy!r} is not known{nearest(strategy, known)}")
        for family, instead in _INSTEAD.items():
            if strategy.lower().startswith(family):
                self.parser.error(
                    f"trainer.strategy={strategy!r} takes a precision plugin of its own, and no AccelPlugin: {instead}"
                )

    def _section(self, config: Any, name: str) -> Any:
        """Returns a section of the configuration, inside the subcommand's if there is one."""
        return config.get(str(self.subcommand), config).get(name, {})


def _is_for_xla(strategy: Any, accelerator: Any) -> bool:
    """Returns whether a Trainer would train under XLA: by its strategy, its accelerator, or TPUs that it finds."""
    if isinstance(strategy, str) and strategy != "auto":
        return strategy.lower().startswith(_XLA)
    if isinstance(strategy, Strategy):
        return isinstance(strategy, (SingleDeviceXLAStrategy, XLAStrategy))
    if accelerator in (None, "auto"):
        return Host.detect().kind == "xla"
    return accelerator == "tpu" or isinstance(accelerator, XLAAccelerator)


def _hint(message: str, names: list[str]) -> str:
    unknown = _UNKNOWN.search(message)
    if unknown is None:
        return ""
    key, group = unknown["key"] or unknown["flag"], f"{unknown['group']}."
    if (technique := key.rpartition("accel.")[2]) in declarations():
        return f": {written(technique, '...')} sets it."
    if unknown["group"]:
        names = [name.removeprefix(group) for name in names if name.startswith(group)]
    return nearest(key, names)


def _setting_names(parser: Any) -> list[str]:
    """Returns every dotted key that ``parser`` and the parsers of its subcommands know."""
    names = {f"accel.{name}" for name in DEFAULTS}
    for action in parser_actions(parser):
        names.add(action.dest)
        if isinstance(action.choices, Mapping):
            for subparser in action.choices.values():
                names.update(_setting_names(subparser))
    return sorted(names)
