"""The two names of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``: one source, released as two packages.

``isinstance`` separates the classes of both packages, and a Trainer accepts those of its own package only. The rest of
the library takes Lightning's names from this module and imports neither package. A name from here stands for that name
in every package that the program has imported.

No plain form was found for subclasses: a class of ours that derives from such a name has the classes of all imported
packages as its bases. If the program imports a package later (``from lightning_accel import AccelPlugin`` may precede
``from pytorch_lightning import Trainer``), its classes are added to these bases. The order of the bases is that of the
imports; :func:`in_order_of` makes a strategy follow its Trainer's package instead.
"""

from __future__ import annotations

import copyreg
import functools
import sys
from abc import ABC, ABCMeta
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, Union

from typing_extensions import override

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as CheckpointIO
    from lightning.fabric.plugins import ClusterEnvironment as ClusterEnvironment
    from lightning.fabric.plugins import TorchCheckpointIO as TorchCheckpointIO
    from lightning.fabric.plugins import precision as _fabric_precision
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment as SLURMEnvironment
    from lightning.fabric.utilities.throughput import get_available_flops as get_available_flops
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch import LightningDataModule as LightningDataModule
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer
    from lightning.pytorch import seed_everything as seed_everything
    from lightning.pytorch.accelerators import Accelerator as Accelerator
    from lightning.pytorch.accelerators import XLAAccelerator as XLAAccelerator
    from lightning.pytorch.callbacks import BatchSizeFinder as BatchSizeFinder
    from lightning.pytorch.callbacks import LearningRateFinder as LearningRateFinder
    from lightning.pytorch.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from lightning.pytorch.callbacks import WeightAveraging as WeightAveraging
    from lightning.pytorch.cli import LightningArgumentParser as LightningArgumentParser
    from lightning.pytorch.cli import LightningCLI as LightningCLI
    from lightning.pytorch.core.optimizer import LightningOptimizer as LightningOptimizer
    from lightning.pytorch.loggers import CSVLogger as CSVLogger
    from lightning.pytorch.loggers import MLFlowLogger as MLFlowLogger
    from lightning.pytorch.loggers import TensorBoardLogger as TensorBoardLogger
    from lightning.pytorch.loggers import WandbLogger as WandbLogger
    from lightning.pytorch.loggers.logger import DummyLogger as DummyLogger
    from lightning.pytorch.plugins.layer_sync import LayerSync as LayerSync
    from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm as TorchSyncBatchNorm
    from lightning.pytorch.plugins.precision import MixedPrecision as MixedPrecision
    from lightning.pytorch.plugins.precision import Precision as Precision
    from lightning.pytorch.plugins.precision import XLAPrecision as XLAPrecision
    from lightning.pytorch.profilers import PyTorchProfiler as PyTorchProfiler
    from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
    from lightning.pytorch.strategies import ModelParallelStrategy as ModelParallelStrategy
    from lightning.pytorch.strategies import ParallelStrategy as ParallelStrategy
    from lightning.pytorch.strategies import SingleDeviceStrategy as SingleDeviceStrategy
    from lightning.pytorch.strategies import Strategy as Strategy
    from lightning.pytorch.strategies import StrategyRegistry as StrategyRegistry
    from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy
    from lightning.pytorch.strategies.xla import XLAStrategy as XLAStrategy
    from lightning.pytorch.trainer.states import TrainerFn as TrainerFn
    from lightning.pytorch.utilities import CombinedLoader as CombinedLoader
    from lightning.pytorch.utilities import rank_zero_warn as rank_zero_warn
    from lightning.pytorch.utilities.data import extract_batch_size as extract_batch_size
    from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature as is_param_in_hook_signature

    FabricPrecision = _fabric_precision.Precision

_HOMES = {
    "fabric.plugins": ("CheckpointIO", "ClusterEnvironment", "TorchCheckpointIO"),
    "fabric.plugins.environments.slurm": ("SLURMEnvironment",),
    "fabric.plugins.precision": ("FabricPrecision",),
    "fabric.utilities.throughput": ("get_available_flops",),
    "pytorch": ("Callback", "LightningDataModule", "LightningModule", "Trainer", "seed_everything"),
    "pytorch.accelerators": ("Accelerator", "XLAAccelerator"),
    "pytorch.callbacks": ("BatchSizeFinder", "LearningRateFinder", "StochasticWeightAveraging", "WeightAveraging"),
    "pytorch.cli": ("LightningArgumentParser", "LightningCLI"),
    "pytorch.core.optimizer": ("LightningOptimizer",),
    "pytorch.loggers": ("CSVLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"),
    "pytorch.loggers.logger": ("DummyLogger",),
    "pytorch.plugins.layer_sync": ("LayerSync", "TorchSyncBatchNorm"),
    "pytorch.plugins.precision": ("MixedPrecision", "Precision", "XLAPrecision"),
    "pytorch.profilers": ("PyTorchProfiler",),
    "pytorch.strategies": (
        *("DDPStrategy", "ModelParallelStrategy", "ParallelStrategy", "SingleDeviceStrategy", "Strategy"),
        *("SingleDeviceXLAStrategy", "StrategyRegistry", "XLAStrategy"),
    ),
    "pytorch.trainer.states": ("TrainerFn",),
    "pytorch.utilities": ("CombinedLoader", "rank_zero_warn"),
    "pytorch.utilities.data": ("extract_batch_size",),
    "pytorch.utilities.model_helpers": ("is_overridden",),
    "pytorch.utilities.signature_utils": ("is_param_in_hook_signature",),
}
_OTHERWISE = {"FabricPrecision": "Precision"}  # Lightning's own spelling of names that exist twice
_ABSTRACT = ("fabric.plugins", "pytorch.plugins.layer_sync", "pytorch.strategies")  # modules whose classes are ABCs
_Name = TypeVar("_Name")


@dataclass(frozen=True)
class Package:
    """One of Lightning's packages.

    Attributes:
        pytorch: The name of its Trainer package.
        fabric: The name of the Fabric package below that.
    """

    pytorch: str
    fabric: str

    def is_imported(self, part: str) -> bool:
        """Returns whether the program has completely imported this part, ``"pytorch"`` or ``"fabric"``."""
        return hasattr(sys.modules.get(getattr(self, part)), LAST_NAMES[part])

    def has(self, kind: type) -> bool:
        """Returns whether a class is one of Lightning's own in this package."""
        return kind.__module__.startswith((f"{self.pytorch}.", f"{self.fabric}."))

    def get(self, home: str, name: str) -> Any:
        """Returns the object ``name`` of the module ``home``, for example ``"pytorch.strategies"``."""
        part, dot, rest = home.partition(".")
        return getattr(import_module(f"{getattr(self, part)}{dot}{rest}"), name)


PACKAGES = Package("lightning.pytorch", "lightning.fabric"), Package("pytorch_lightning", "lightning_fabric")
LAST_NAMES = {"pytorch": "Trainer", "fabric": "Fabric"}  # names that exist once a part is completely imported
_in_their_order: dict[str, list[Package]] = {"pytorch": [], "fabric": []}


def imported(part: str = "pytorch") -> Sequence[Package]:
    """Returns the packages of which the program has imported this part, in the order of import."""
    order = _in_their_order[part]
    new = [one for one in PACKAGES if one not in order and one.is_imported(part)]
    if new:
        order.extend(new)
        for name in _SHARED:
            if name.part == part:
                name.base.__bases__ = name.in_each(order)
    return order


def in_use() -> Package:
    """Returns the package for things without a Trainer. If none is imported yet, imports one that is installed."""
    if not imported():
        try:
            import_module(PACKAGES[0].pytorch)
        except ModuleNotFoundError as error:
            if error.name not in ("lightning", "lightning.pytorch"):
                raise
            import_module(PACKAGES[1].pytorch)
    return imported()[0]


def package_of(thing: object) -> Package | None:
    """Returns the package from which a class, or an object's class, is or derives. None if it is neither's."""
    kind = thing if isinstance(thing, type) else type(thing)
    return next((one for base in kind.__mro__ for one in PACKAGES if one.has(base)), None)


def is_lightnings(kind: type) -> bool:
    """Returns whether a class is Lightning's own, of either package, and not a class derived from one."""
    return any(one.has(kind) for one in PACKAGES)


def own(thing: object, name: _Name) -> _Name:
    """Returns the object of a name from this module in the package of ``thing``: ``own(trainer, Strategy)``."""
    shared: Any = name
    return shared.of(package_of(thing) or in_use())  # type: ignore[no-any-return]


def callbacks_of(trainer: Any, *kinds: type) -> list[Any]:
    """The callbacks of a Trainer; with ``kinds`` those of them."""
    return [one for one in trainer.callbacks if isinstance(one, kinds or object)]


def classes(name: _Name) -> tuple[_Name, ...]:
    """Returns the objects of a name from this module in all packages, for uses that require classes."""
    in_use()
    shared: Any = name
    return tuple(map(shared.of, imported()))


class _Shared:
    """The objects (classes, functions or others) that all imported packages have by one name."""

    def __init__(self, home: str, name: str) -> None:
        self.part = home.partition(".")[0]
        self._home = home
        self._name = name

    def of(self, package: Package) -> Any:
        return package.get(self._home, self._name)

    def in_each(self, packages: Sequence[Package]) -> tuple[Any, ...]:
        """Returns each package's object without repetition: a program may have aliased one package to the other."""
        return tuple(dict.fromkeys(map(self.of, packages)))

    @functools.cached_property
    def base(self) -> Any:
        """Returns a class that derives from the object of each package."""
        kinds = self.in_each(imported(self.part)) or (_ABC if self._home in _ABSTRACT else _Object,)
        made = _InEitherPackage(self._name, kinds, {"__module__": __name__})
        _SHARED.append(self)
        return made

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        return (self.base,)

    def __instancecheck__(self, instance: object) -> bool:
        return any(isinstance(instance, self.of(one)) for one in imported(self.part))

    def __subclasscheck__(self, kind: type) -> bool:
        return any(issubclass(kind, self.of(one)) for one in imported(self.part))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        package = next((found for thing in args if (found := package_of(thing))), None)
        return self.of(package or in_use())(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection
            raise AttributeError(name)
        return getattr(self.of(in_use()), name)

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007


_SHARED: list[_Shared] = []  # the names from which a class of ours derives


if not TYPE_CHECKING:

    def __getattr__(name: str) -> _Shared:
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        shared = globals()[name] = _Shared(home, _OTHERWISE.get(name, name))
        return shared


# -- classes of ours -----------------------------------------------------------------------------------------------


class _Object:
    """The base before any package is imported; its memory layout allows an exchange for Lightning's classes."""


class _ABC(ABC):  # noqa: B024
    """The same for abstract classes."""


class _InEitherPackage(ABCMeta):
    """The metaclass of our classes that derive from Lightning's."""

    @override
    def mro(cls) -> list[type]:
        order = super().mro()
        first: Package | None = next((vars(kind)["_first"] for kind in order if "_first" in vars(kind)), None)
        if first is None:
            return order
        theirs = [kind for kind in order if is_lightnings(kind)]
        sorted_ = iter(sorted(theirs, key=lambda kind: not first.has(kind)))
        return [next(sorted_) if kind in theirs else kind for kind in order]


def in_order_of(package: Package, kind: Any) -> Any:
    """Returns ``kind`` with the methods that it inherits from Lightning taken from ``package``.

    A method of the other package does not recognise this package's Trainers and modules, and skips work for them.
    """
    kind = vars(kind).get("_plain", kind)
    return kind if package_of(kind) == package else _reordered(package, kind)


@functools.cache
def _reordered(package: Package, kind: Any) -> Any:
    likeness = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind)(kind.__name__, (kind,), {**likeness, "_first": package, "_plain": kind})


def _pickled(kind: _InEitherPackage) -> Any:
    if "_plain" in vars(kind):
        return in_order_of, (vars(kind)["_first"], vars(kind)["_plain"])
    return kind.__qualname__  # by name, as other classes are pickled


copyreg.pickle(_InEitherPackage, _pickled)
