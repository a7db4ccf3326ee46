"""The registry of models: every architecture by name, with its paper, its options and its size.

``create`` builds a model by name. The options of a model are read from its factory's signature: a function of a few
arguments, or a frozen dataclass of many. ``create_own`` builds a user's own model from the code that the user named.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dpvision.errors import ArgumentError, Problems, brief, did_you_mean, require_memory, translated_errors
from dpvision.models.densenet import densenet121
from dpvision.models.efficientnet import efficientnet_b0, efficientnet_lite0
from dpvision.models.initialisation import seeded
from dpvision.models.nfnet import F0, F3, nf_resnet, nfnet
from dpvision.models.resnet import ResNet, ResNet9
from dpvision.models.scattering import ScatterCNN, scatter_linear
from dpvision.models.shoefit import doermann_cnn, linear, shoefit_allconv, shoefit_cifar, shoefit_cnn, tempered_cnn
from dpvision.models.smoothnet import SmoothNet
from dpvision.models.unet import Segmentation9
from dpvision.models.vgg import vgg16_conv3
from dpvision.models.wrn import WideResNet
from dpvision.own_code import OwnCode, arguments_for, code_errors


class Design(Protocol):
    """The options of a model as one value that can build the model."""

    def build(self) -> nn.Module:
        """Build the model, with weights drawn from the default generator."""
        ...


Factory = Callable[..., nn.Module | Design]
_GIVEN_TO_CREATE = ("num_classes", "in_channels")
_LARGE = 1024
"""A larger number among the options may make a model that does not fit into memory, so its size is checked first."""
_FOREIGN = (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError, MemoryError)


@final
@dataclass(frozen=True)
class Entry:
    """One architecture of the registry.

    Attributes:
        name: what ``create`` takes.
        family: architectures of one family share a module.
        paper: where it comes from.
        image_size: side of the paper's images in pixels.
        in_channels: channels of the paper's images.
        num_classes: classes of the paper's task.
        parameters: number of parameters with these and the default options.
        factory: makes the model, or its ``Design``.
        purpose: what it is for, in a line.
    """

    name: str
    family: str
    paper: str
    image_size: int
    in_channels: int
    num_classes: int
    parameters: int
    factory: Factory = field(repr=False, compare=False)
    purpose: str

    @property
    def options(self) -> dict[str, Any]:
        """The options that ``create`` takes for this name, with their defaults."""
        fixed = self.factory.keywords if isinstance(self.factory, functools.partial) else {}
        parameters = inspect.signature(self.factory).parameters
        return {key: p.default for key, p in parameters.items() if key not in (*_GIVEN_TO_CREATE, *fixed)}

    def build(self, *, num_classes: int, in_channels: int, **options: Any) -> nn.Module:
        """Build the model with some of its ``options``, others as in the paper; ``create`` checks their names."""
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
_unet9, _linknet9 = _fixed(Segmentation9, join="concat"), _fixed(Segmentation9, join="add")
# fmt: off
# name, family, paper, image size, input channels, classes, parameters, factory; purpose
_ROWS: tuple[tuple[str, str, str, int, int, int, int, Factory, str], ...] = (
    ("linear", "linear", "-", 28, 1, 10, 7_850, linear,
     "logistic regression on the pixels: the floor that other models must beat"),
    ("shoefit_cnn", "shoefit", _SHOEFIT, 28, 1, 10, 26_010, shoefit_cnn,
     "small grey images (MNIST, FashionMNIST): tanh against relu, capacity by filters=k"),
    ("doermann_cnn", "shoefit", _DOERMANN, 28, 1, 10, 25_386, doermann_cnn,
     "small grey images: pools before tanh, tuned for large batches"),
    ("shoefit_cifar", "shoefit", _SHOEFIT, 32, 3, 10, 2_395_434, shoefit_cifar,
     "CIFAR: pre-train in public, fine-tune the last layer in private"),
    ("shoefit_allconv", "shoefit", _SHOEFIT, 32, 3, 10, 2_334_730, shoefit_allconv,
     "CIFAR: the study of Mean-Var initialisation"),
    ("tempered_cnn", "shoefit", _TEMPERED, 32, 3, 10, 550_570, tempered_cnn,
     "CIFAR: bounded activations, tempered_sigmoid(scale,temperature,offset)"),
    ("resnet9", "resnet9", _SCALENORM, 32, 3, 10, 2_447_946, _fixed(ResNet9, scale_norm=False),
     "colour images of 32 to 160 pixels: the ScaleNorm papers' baseline"),
    ("scaleresnet9", "resnet9", _SCALENORM, 32, 3, 10, 2_448_714, _fixed(ResNet9, scale_norm=True),
     "ResNet-9 with a norm after each residual addition: the papers' best from scratch"),
    ("resnet18", "resnet", _SMOOTHNET, 32, 3, 10, 11_173_962, _fixed(ResNet, depth=18),
     "baseline with GroupNorm and a 3×3 stem"),
    ("resnet34", "resnet", _SMOOTHNET, 224, 3, 10, 21_289_802, _fixed(ResNet, depth=34),
     "baseline with GroupNorm and the ImageNet stem"),
    ("resnet50", "resnet", _SCALENORM, 160, 3, 10, 23_528_522, _fixed(ResNet, depth=50, scale_norm=False),
     "larger images (ImageNette at 160 pixels); best with norm=layer"),
    ("scaleresnet50", "resnet", _SCALENORM, 160, 3, 10, 23_558_730, _fixed(ResNet, depth=50, scale_norm=True),
     "ResNet-50 with a norm after each residual addition; use norm=layer"),
    ("wrn16_4", "wrn", _SCALE, 32, 3, 10, 2_753_818, _fixed(WideResNet, depth=16, scale_norm=False),
     "CIFAR with augmentation multiplicity: weight standardisation, activation before norm"),
    ("wrn40_4", "wrn", _SCALE, 32, 3, 10, 8_961_306, _fixed(WideResNet, depth=40),
     "the strongest CIFAR model from scratch at epsilon 8"),
    ("wrn28_10", "wrn", _SCALE, 32, 3, 10, 36_500_378, _fixed(WideResNet, depth=28, width=10),
     "private fine-tuning after public pre-training at 32 pixels"),
    ("scalewrn16_4", "wrn", _SCALENORM, 32, 3, 10, 2_755_610, _fixed(WideResNet, depth=16, scale_norm=True),
     "WRN-16-4 with ScaleNorm; layout=plain is the ScaleNorm paper's own"),
    ("smoothnet", "smoothnet", _SMOOTHNET, 32, 3, 10, 3_391_853, SmoothNet,
     "wide, shallow, dense, SELU; its parts are switches"),
    ("densenet121", "densenet", _SMOOTHNET, 224, 3, 10, 6_964_106, densenet121,
     "baseline with GroupNorm and the ImageNet stem"),
    ("efficientnet_b0", "efficientnet", _SMOOTHNET, 224, 3, 10, 4_020_358, efficientnet_b0,
     "baseline with GroupNorm and the ImageNet stem"),
    ("nf_resnet50", "nfnet", _SCALE, 224, 3, 1_000, 25_557_048, _fixed(nf_resnet, depth=50),
     "ImageNet from scratch, without norms"),
    ("nf_resnet101", "nfnet", _SCALE, 224, 3, 1_000, 44_549_193, _fixed(nf_resnet, depth=101),
     "private fine-tuning after large public pre-training"),
    ("nf_resnet152", "nfnet", _SCALE, 224, 3, 1_000, 60_192_858, _fixed(nf_resnet, depth=152),
     "private fine-tuning after large public pre-training"),
    ("nf_resnet200", "nfnet", _SCALE, 224, 3, 1_000, 64_673_898, _fixed(nf_resnet, depth=200),
     "private fine-tuning of the last layer after large public pre-training"),
    ("nfnet_f0", "nfnet", _SCALE, 192, 3, 1_000, 71_489_284, _fixed(nfnet, size=F0),
     "the smallest NFNet"),
    ("nfnet_f3", "nfnet", _SCALE, 320, 3, 1_000, 254_924_200, _fixed(nfnet, size=F3),
     "the strongest fine-tuning results, after large public pre-training"),
    ("unet9", "segmentation", _SCALENORM, 256, 1, 1, 12_470_338, _fixed(_unet9, scale_norm=False),
     "segmentation of grey slices; long skips are concatenated"),
    ("scaleunet9", "segmentation", _SCALENORM, 256, 1, 1, 12_474_178, _fixed(_unet9, scale_norm=True),
     "UNet-9 with a norm after each addition and each join"),
    ("linknet9", "segmentation", _SCALENORM, 256, 1, 1, 7_233_410, _fixed(_linknet9, scale_norm=False),
     "segmentation of grey slices; long skips are added"),
    ("scalelinknet9", "segmentation", _SCALENORM, 256, 1, 1, 7_235_714, _fixed(_linknet9, scale_norm=True),
     "LinkNet-9 with a norm after each addition"),
    ("scatter_linear", "scatter", _SCATTER, 32, 3, 10, 155_530, scatter_linear,
     "fixed wavelet features, linear: the best without public data at small epsilon"),
    ("scatter_cnn", "scatter", _SCATTER, 32, 3, 10, 187_210, ScatterCNN,
     "fixed wavelet features and a small CNN"),
    ("efficientnet_lite0", "backbone", _LITE, 224, 3, 10, 3_341_802, efficientnet_lite0,
     "public ImageNet weights (--transfer-weights efficientnet-lite0), a private head on frozen features"),
    ("vgg16_conv3", "backbone", _VGG, 32, 3, 10, 1_745_738, vgg16_conv3,
     "public ImageNet weights (--transfer-weights vgg16-conv1-3), a private head on early features"),
)
# fmt: on

ENTRIES: tuple[Entry, ...] = tuple(Entry(*row) for row in _ROWS)
_BY_NAME: dict[str, Entry] = {each.name: each for each in ENTRIES}


def catalogue() -> tuple[Entry, ...]:
    """Every registered architecture, family by family."""
    return ENTRIES


def entry(name: str) -> Entry:
    """Look up an architecture.

    Args:
        name: a registered name.

    Raises:
        ArgumentError: if there is none of that name; the message suggests similar ones.
    """
    if name not in _BY_NAME:
        hint = did_you_mean(name, _BY_NAME)
        raise ArgumentError(f"model must be a name of the catalogue, got {brief(name)!r}. {hint}")
    return _BY_NAME[name]


def create(
    name: str, *, num_classes: int = 10, in_channels: int = 3, seed: int | None = None, **options: Any
) -> nn.Module:
    """Build a model on the CPU.

    Args:
        name: a registered name.
        num_classes: number of outputs, at least 1.
        in_channels: channels of the images, at least 1.
        seed: of the initial weights; None takes entropy from the operating system. The global generator does not move.
        options: those of ``entry(name).options``; any other is refused.

    Returns:
        The model in training mode, float32.

    Raises:
        ArgumentError: if an argument is not possible or the model does not fit into memory.
    """
    build = _checked(name, num_classes=num_classes, in_channels=in_channels, options=options)
    with translated_errors(*_FOREIGN, saying=f"{name} can't be made with the options {brief(options)}"):
        numbers = [num_classes, in_channels, *(value for value in options.values() if isinstance(value, int))]
        if max(numbers) > _LARGE:
            size = _count(build) * torch.float32.itemsize
            require_memory(size, "the model", remedy="Lower its options.", error=ArgumentError)
        with torch.device("cpu"), seeded(seed):
            return build()


def create_own(code: OwnCode, *, num_classes: int, image_shape: tuple[int, int, int], seed: int | None) -> nn.Module:
    """Build a user's own model on the CPU.

    Args:
        code: a function or class that makes the model; it takes no argument, or any of ``num_classes``, ``in_channels``
            and ``image_size`` by name. Or the model itself, which is copied.
        num_classes: number of outputs, or of maps for segmentation.
        image_shape: (channels, height, width) of the images; ``image_size`` is the side of a square image, else
            (height, width).
        seed: of torch's default generator while the model is made; None takes entropy from the operating system.

    Returns:
        The model in training mode, with the initial weights that its code gives it.

    Raises:
        ArgumentError: the code fails, needs other arguments, or makes no ``torch.nn.Module``.
    """
    channels, height, width = image_shape
    size = height if height == width else (height, width)
    offered = {"num_classes": num_classes, "in_channels": channels, "image_size": size}
    with code_errors(f"{code.name} can't make a model"), code.importable(), torch.device("cpu"), seeded(seed):
        if isinstance(code.value, nn.Module):
            model: Any = copy.deepcopy(code.value)
        else:
            model = code.value(**arguments_for(code.value, offered, name=code.name))
    if not isinstance(model, nn.Module):
        hint = (
            " make_private_ready returns the model and a list of changes: return the first." if _is_pair(model) else ""
        )
        raise ArgumentError(f"{code.name} must give a torch.nn.Module, got {type(model).__name__}.{hint}")
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ArgumentError(f"{code.name} has lazy layers without a size: run the model once before you return it.")
    return model.train()


def _is_pair(made: object) -> bool:
    """Whether a function returned a module and something else."""
    return isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)


def count_parameters(name: str, *, num_classes: int = 10, in_channels: int = 3, **options: Any) -> int:
    """Count the parameters of the model that ``create`` would build with the same arguments, without building it."""
    return _count(_checked(name, num_classes=num_classes, in_channels=in_channels, options=options))


def _count(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"), seeded(0):
        return sum(parameter.numel() for parameter in build().parameters())


def _checked(name: str, *, num_classes: int, in_channels: int, options: dict[str, Any]) -> Callable[[], nn.Module]:
    """Check the arguments and return a function that builds the model."""
    found = entry(name)
    problems = Problems()
    problems.count("num_classes", num_classes)
    problems.count("in_channels", in_channels)
    unknown = [key for key in options if key not in found.options]
    allowed = ", ".join(found.options) or "none"
    problems.require(not unknown, f"{name} has no option {', '.join(unknown)}. Allowed options: {allowed}.")
    problems.raise_if_any()
    return functools.partial(found.build, num_classes=num_classes, in_channels=in_channels, **options)
