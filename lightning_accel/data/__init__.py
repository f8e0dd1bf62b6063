"""From loader to device: batch transforms that run where the model runs, and a pipeline that prepares batches ahead."""

from lightning_accel.data.batch import Position
from lightning_accel.data.chain import Preprocess
from lightning_accel.data.color import ColorJitter, Normalize
from lightning_accel.data.features import GaussianNoise, SlidingWindow, Whiten
from lightning_accel.data.geometry import RandomCrop, RandomHorizontalFlip, RandomResizedCrop
from lightning_accel.data.mixing import CutMix, MixUp, RandomErasing
from lightning_accel.data.pipeline import DevicePipeline
from lightning_accel.data.transform import Map, Transform

__all__ = [
    "ColorJitter",
    "CutMix",
    "DevicePipeline",
    "GaussianNoise",
    "Map",
    "MixUp",
    "Normalize",
    "Position",
    "Preprocess",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "SlidingWindow",
    "Transform",
    "Whiten",
]
