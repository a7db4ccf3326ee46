"""What the catalogue holds: every architecture, where it comes from and how large it is.

An entry's options are read off its factory: a function of few arguments, or a frozen dataclass of many.

The catalogue: names → models.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import nn

from dpvision.errors import ArgumentError, DPVisionError, Problems, brief
from dpvision.models.densenet import densenet121
from dpvision.models.efficientnet import efficientnet_b0, efficientnet_lite0
from dpvision.models.initialisation import seeded
from dpvision.models.nfnet import F0, F3, nf_resnet, nfnet
from dpvision.models.resnet import ResNet, resnet9
from dpvision.models.scattering import ScatterCNN, scatter_linear
from dpvision.models.shoefit import doermann_cnn, linear, shoefit_allconv, shoefit_cifar, shoefit_cnn, tempered_cnn
from dpvision.models.smoothnet import SmoothNet
from dpvision.models.unet import segmentation9
from dpvision.models.vgg import vgg16_conv3
from dpvision.models.wrn import WideResNet


class Design(Protocol):
    """A model's options as one value that can make the model."""

    def build(self) -> nn.Module:
        """The model, its weights drawn from the default generator."""
        ...


Factory = Callable[..., nn.Module | Design]
_GIVEN_TO_CREATE = ("num_classes", "in_channels")


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """One architecture: where it comes from and how large it is with the paper's input and default options."""

    name: str
    family: str
    paper: str
    purpose: str
    image_size: int
    in_channels: int = 3
    num_classes: int = 10
    parameters: int
    factory: Factory = field(repr=False, compare=False)

    @property
    def options(self) -> dict[str, Any]:
        """The options that ``create`` takes for this name, with their defaults."""
        fixed = self.factory.keywords if isinstance(self.factory, functools.partial) else {}
        parameters = inspect.signature(self.factory).parameters
        return {key: p.default for key, p in parameters.items() if key not in (*_GIVEN_TO_CREATE, *fixed)}

    def build(self, *, num_classes: int, in_channels: int, **options: Any) -> nn.Module:
        """The model with these of its ``options``, others as the paper has them; ``create`` checks their names."""
        made = self.factory(num_classes=num_classes, in_channels=in_channels, **options)
        return made if isinstance(made, nn.Module) else made.build()


_SHOEFIT = "Papernot et al. 2019, Making the shoe fit"
_TEMPERED = "Papernot et al. 2021, Tempered sigmoids"
_DOERMANN = "Dörmann et al. 2021, Not all noise is accounted equally"
_SCALENORM = "Klause et al. 2022, ScaleNorm"
_SMOOTHNET = "Remerscheid et al. 2022, SmoothNets"
_SCALE = "De et al. 2022, Unlocking accuracy through scale"
_SCATTER = "Tramèr & Boneh 2021, Differentially private learning needs better features"
_LITE = "Liu 2020, EfficientNet-Lite (after Tan & Le 2019)"
_VGG = "Simonyan & Zisserman 2015, Very deep convolutional networks"

_fixed = functools.partial
ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="linear",
        family="linear",
        paper="-",
        purpose="logistic regression on the pixels: the floor that other models must beat",
        image_size=28,
        in_channels=1,
        parameters=7_850,
        factory=linear,
    ),
    Entry(
        name="shoefit_cnn",
        family="shoefit",
        paper=_SHOEFIT,
        purpose="small grey images (MNIST, FashionMNIST): tanh against relu, capacity by filters=k",
        image_size=28,
        in_channels=1,
        parameters=26_010,
        factory=shoefit_cnn,
    ),
    Entry(
        name="doermann_cnn",
        family="shoefit",
        paper=_DOERMANN,
        purpose="small grey images: pools before tanh, tuned for large batches",
        image_size=28,
        in_channels=1,
        parameters=25_386,
        factory=doermann_cnn,
    ),
    Entry(
        name="shoefit_cifar",
        family="shoefit",
        paper=_SHOEFIT,
        purpose="CIFAR: pre-train in public, fine-tune the last layer in private",
        image_size=32,
        parameters=2_395_434,
        factory=shoefit_cifar,
    ),
    Entry(
        name="shoefit_allconv",
        family="shoefit",
        paper=_SHOEFIT,
        purpose="CIFAR: the study of Mean-Var initialisation",
        image_size=32,
        parameters=2_334_730,
        factory=shoefit_allconv,
    ),
    Entry(
        name="tempered_cnn",
        family="shoefit",
        paper=_TEMPERED,
        purpose="CIFAR: bounded activations, tempered_sigmoid(scale,temperature,offset)",
        image_size=32,
        parameters=550_570,
        factory=tempered_cnn,
    ),
    Entry(
        name="resnet9",
        family="resnet9",
        paper=_SCALENORM,
        purpose="colour images of 32 to 160 pixels: the ScaleNorm papers' baseline",
        image_size=32,
        parameters=2_447_946,
        factory=_fixed(resnet9, scale_norm=False),
    ),
    Entry(
        name="scaleresnet9",
        family="resnet9",
        paper=_SCALENORM,
        purpose="ResNet-9 with a norm after each residual addition: the papers' best from scratch",
        image_size=32,
        parameters=2_448_714,
        factory=_fixed(resnet9, scale_norm=True),
    ),
    Entry(
        name="resnet18",
        family="resnet",
        paper=_SMOOTHNET,
        purpose="baseline with GroupNorm and a 3×3 stem",
        image_size=32,
        parameters=11_173_962,
        factory=_fixed(ResNet, depth=18),
    ),
    Entry(
        name="resnet34",
        family="resnet",
        paper=_SMOOTHNET,
        purpose="baseline with GroupNorm and the ImageNet stem",
        image_size=224,
        parameters=21_289_802,
        factory=_fixed(ResNet, depth=34),
    ),
    Entry(
        name="resnet50",
        family="resnet",
        paper=_SCALENORM,
        purpose="larger images (ImageNette at 160 pixels); best with norm=layer",
        image_size=160,
        parameters=23_528_522,
        factory=_fixed(ResNet, depth=50, scale_norm=False),
    ),
    Entry(
        name="scaleresnet50",
        family="resnet",
        paper=_SCALENORM,
        purpose="ResNet-50 with a norm after each residual addition; use norm=layer",
        image_size=160,
        parameters=23_558_730,
        factory=_fixed(ResNet, depth=50, scale_norm=True),
    ),
    Entry(
        name="wrn16_4",
        family="wrn",
        paper=_SCALE,
        purpose="CIFAR with augmentation multiplicity: weight standardisation, activation before norm",
        image_size=32,
        parameters=2_753_818,
        factory=_fixed(WideResNet, depth=16, scale_norm=False),
    ),
    Entry(
        name="wrn40_4",
        family="wrn",
        paper=_SCALE,
        purpose="the strongest CIFAR model from scratch at epsilon 8",
        image_size=32,
        parameters=8_961_306,
        factory=_fixed(WideResNet, depth=40, width=4),
    ),
    Entry(
        name="wrn28_10",
        family="wrn",
        paper=_SCALE,
        purpose="private fine-tuning after public pre-training at 32 pixels",
        image_size=32,
        parameters=36_500_378,
        factory=_fixed(WideResNet, depth=28, width=10),
    ),
    Entry(
        name="scalewrn16_4",
        family="wrn",
        paper=_SCALENORM,
        purpose="WRN-16-4 with ScaleNorm; layout=plain is the ScaleNorm paper's own",
        image_size=32,
        parameters=2_755_610,
        factory=_fixed(WideResNet, depth=16, scale_norm=True),
    ),
    Entry(
        name="smoothnet",
        family="smoothnet",
        paper=_SMOOTHNET,
        purpose="wide, shallow, dense, SELU; its parts are switches",
        image_size=32,
        parameters=3_391_853,
        factory=SmoothNet,
    ),
    Entry(
        name="densenet121",
        family="densenet",
        paper=_SMOOTHNET,
        purpose="baseline with GroupNorm and the ImageNet stem",
        image_size=224,
        parameters=6_964_106,
        factory=densenet121,
    ),
    Entry(
        name="efficientnet_b0",
        family="efficientnet",
        paper=_SMOOTHNET,
        purpose="baseline with GroupNorm and the ImageNet stem",
        image_size=224,
        parameters=4_020_358,
        factory=efficientnet_b0,
    ),
    Entry(
        name="nf_resnet50",
        family="nfnet",
        paper=_SCALE,
        purpose="ImageNet from scratch, without norms",
        image_size=224,
        num_classes=1_000,
        parameters=25_557_048,
        factory=_fixed(nf_resnet, depth=50),
    ),
    Entry(
        name="nf_resnet200",
        family="nfnet",
        paper=_SCALE,
        purpose="private fine-tuning of the last layer after large public pre-training",
        image_size=224,
        num_classes=1_000,
        parameters=64_673_898,
        factory=_fixed(nf_resnet, depth=200),
    ),
    Entry(
        name="nfnet_f0",
        family="nfnet",
        paper=_SCALE,
        purpose="the smallest NFNet",
        image_size=192,
        num_classes=1_000,
        parameters=71_489_284,
        factory=_fixed(nfnet, size=F0),
    ),
    Entry(
        name="nfnet_f3",
        family="nfnet",
        paper=_SCALE,
        purpose="the strongest fine-tuning results, after large public pre-training",
        image_size=320,
        num_classes=1_000,
        parameters=254_924_200,
        factory=_fixed(nfnet, size=F3),
    ),
    Entry(
        name="unet9",
        family="segmentation",
        paper=_SCALENORM,
        purpose="segmentation of grey slices; long skips are concatenated",
        image_size=256,
        in_channels=1,
        num_classes=1,
        parameters=12_470_338,
        factory=_fixed(segmentation9, join="concat", scale_norm=False),
    ),
    Entry(
        name="scaleunet9",
        family="segmentation",
        paper=_SCALENORM,
        purpose="UNet-9 with a norm after each addition and each join",
        image_size=256,
        in_channels=1,
        num_classes=1,
        parameters=12_474_178,
        factory=_fixed(segmentation9, join="concat", scale_norm=True),
    ),
    Entry(
        name="linknet9",
        family="segmentation",
        paper=_SCALENORM,
        purpose="segmentation of grey slices; long skips are added",
        image_size=256,
        in_channels=1,
        num_classes=1,
        parameters=7_233_410,
        factory=_fixed(segmentation9, join="add", scale_norm=False),
    ),
    Entry(
        name="scalelinknet9",
        family="segmentation",
        paper=_SCALENORM,
        purpose="LinkNet-9 with a norm after each addition",
        image_size=256,
        in_channels=1,
        num_classes=1,
        parameters=7_235_714,
        factory=_fixed(segmentation9, join="add", scale_norm=True),
    ),
    Entry(
        name="scatter_linear",
        family="scatter",
        paper=_SCATTER,
        purpose="fixed wavelet features, linear: the best without public data at small epsilon",
        image_size=32,
        parameters=155_530,
        factory=scatter_linear,
    ),
    Entry(
        name="scatter_cnn",
        family="scatter",
        paper=_SCATTER,
        purpose="fixed wavelet features and a small CNN",
        image_size=32,
        parameters=187_210,
        factory=ScatterCNN,
    ),
    Entry(
        name="efficientnet_lite0",
        family="backbone",
        paper=_LITE,
        purpose="public ImageNet weights (--transfer-weights efficientnet-lite0), a private head on frozen features",
        image_size=224,
        parameters=3_341_802,
        factory=efficientnet_lite0,
    ),
    Entry(
        name="vgg16_conv3",
        family="backbone",
        paper=_VGG,
        purpose="public ImageNet weights (--transfer-weights vgg16-conv1-3), a private head on early features",
        image_size=32,
        parameters=1_745_738,
        factory=vgg16_conv3,
    ),
)


_BY_NAME: dict[str, Entry] = {found.name: found for found in ENTRIES}
# From here up a number may make a model that does not fit into memory, so it is counted first.
_LARGE = 1024


def catalogue() -> tuple[Entry, ...]:
    """Every architecture, family by family."""
    return ENTRIES


def entry(name: str) -> Entry:
    """The entry of that name."""
    if name not in _BY_NAME:
        close = difflib.get_close_matches(str(name), _BY_NAME, n=3)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"There are: {', '.join(_BY_NAME)}."
        raise ArgumentError(f"model must be a name of the catalogue, got {brief(name)!r}. {hint}")
    return _BY_NAME[name]


def create(
    name: str, *, num_classes: int = 10, in_channels: int = 3, seed: int | None = None, **options: Any
) -> nn.Module:
    """Build a model on the CPU, with weights drawn from ``seed`` (None: from the operating system's entropy).

    ``options`` are those of ``entry(name).options``; any other is refused. The global generator does not move.
    """
    build = _checked(name, num_classes=num_classes, in_channels=in_channels, options=options)
    with _worded(name, options):
        numbers = [num_classes, in_channels, *(value for value in options.values() if isinstance(value, int))]
        if max(numbers) > _LARGE:
            _require_memory(build)
        with torch.device("cpu"), seeded(seed):
            return build()


def count_parameters(name: str, *, num_classes: int = 10, in_channels: int = 3, **options: Any) -> int:
    """How many parameters ``create`` would make, without making them."""
    build = _checked(name, num_classes=num_classes, in_channels=in_channels, options=options)
    return _count(build)


def _count(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"), seeded(0):
        return sum(parameter.numel() for parameter in build().parameters())


def _require_memory(build: Callable[[], nn.Module]) -> None:
    """Refuse a model that this machine can't hold before it is filled with numbers."""
    needed = _count(build) * torch.float32.itemsize
    if needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise ArgumentError(f"the model would need {needed} bytes, more than this machine has. Lower its options.")


@contextmanager
def _worded(name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Options may come from anybody's file: what a model's code says of impossible ones is worded as ours."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError, MemoryError) as error:
        if isinstance(error, DPVisionError):
            raise
        reason = brief((str(error).splitlines() or [type(error).__name__])[0])
        raise ArgumentError(f"{name} can't be made with the options {brief(dict(options))}: {reason}") from error


def _checked(name: str, *, num_classes: int, in_channels: int, options: dict[str, Any]) -> Callable[[], nn.Module]:
    found = entry(name)
    problems = Problems()
    problems.count("num_classes", num_classes)
    problems.count("in_channels", in_channels)
    unknown = [key for key in options if key not in found.options]
    allowed = ", ".join(found.options) or "none"
    problems.require(not unknown, f"{name} has no option {', '.join(unknown)}. Allowed options: {allowed}.")
    problems.raise_if_any()
    return functools.partial(found.build, num_classes=num_classes, in_channels=in_channels, **options)
