"""What a table is: rows that are recipes.

The tables and figures that can be run again.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import final

from dpvision.errors import ArgumentError
from dpvision.papers import (
    find_recipe,
    making_the_shoe_fit,
    own_recipes,
    scalenorm,
    scalenorm_segmentation,
    smoothnets,
    through_scale,
)
from dpvision.papers.recipe import Recipe


@final
@dataclass(frozen=True)
class Row:
    """One line of a table: words for it, and the name of its recipe, which is also the row's own."""

    label: str
    name: str

    @property
    def recipe(self) -> Recipe:
        """What is run."""
        return find_recipe(self.name)


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """A paper's table or figure."""

    name: str
    title: str
    rows: tuple[Row, ...]

    def choose(self, patterns: Sequence[str]) -> tuple[Row, ...]:
        """The rows with these names, or all of them without any; ``*`` stands for anything."""
        if not patterns:
            return self.rows
        for pattern in patterns:
            if not any(fnmatchcase(row.name, pattern) for row in self.rows):
                names = ", ".join(row.name for row in self.rows)
                raise ArgumentError(f"--rows must name rows of {self.name}, got {pattern!r}. There are: {names}.")
        return tuple(row for row in self.rows if any(fnmatchcase(row.name, pattern) for pattern in patterns))


@cache
def all_tables() -> tuple[Table, ...]:
    """Every table, paper by paper."""
    return (
        _table("shoefit-capacity", "Making the shoe fit, Figure 1: filters, MNIST", _capacity()),
        _table("shoefit-activation", "Making the shoe fit, Figure 2: tanh against ReLU", _activation()),
        _table("meanvar", "Making the shoe fit, Figure 4: Mean-Var initialisation", _mean_var()),
        _table("shoefit-adam", "Making the shoe fit, Figure 5: SGD and Adam at three rates, FashionMNIST", _adam()),
        _table("shoefit-table5", "Making the shoe fit, Table 5: batch, epochs and optimizer, FashionMNIST", _table5()),
        _table("shoefit-transfer", "Making the shoe fit: last layer on CIFAR-10 after CIFAR-100", _shoefit_transfer()),
        _table("scalenorm-table1", "ScaleNorm against none", _scalenorm_table1()),
        _table("scalenorm-groups", "ScaleNorm: numbers of groups at epsilon 7.5", _groups()),
        _table("epochs-table5.1", "ScaleNorm thesis, Table 5.1: epochs, CIFAR-10 at epsilon 7.5", _epochs()),
        _table("activation-table5.2", "ScaleNorm thesis, Table 5.2: Mish against ReLU at epsilon 7.5", _mish()),
        _table("transfer-table5.5", "ScaleNorm thesis, Table 5.5: transfer at epsilon 10", _transfer()),
        _table("scalenorm-table6.1", "ScaleNorm thesis, Table 6.1: liver CT, Dice", _masks()),
        _table("liver-patients", "Liver CT: patients as units, and no privacy, Dice", _patients()),
        _table("batch-lr-grid", "ScaleResNet-9 on CIFAR-10 at epsilon 7.5: batch size × learning rate", _grid()),
        _table("smoothnet-table2", "SmoothNets, Table 2: architectures at epsilon 7", _architectures()),
        _table("smoothnet-components", "SmoothNets: components, CIFAR-10 at epsilon 7", _components()),
        _table("de-ablation", "De et al., Table 1: the ladder, CIFAR-10 at epsilon 8", _ladder()),
        _table("de-cifar10", "De et al.: CIFAR-10 from scratch", _wrn()),
        _table("de-views", "De et al.: numbers of views, CIFAR-10 at epsilon 8", _views()),
        _table("scattering", "Fixed wavelet features", _named(own_recipes.feature_recipes, own_recipes.SOURCE)),
        _table(
            "public-features", "CIFAR-10 on public features", _named(own_recipes.feature_recipes, own_recipes.PUBLIC)
        ),
    )


def find_table(name: str) -> Table:
    """The table of that name."""
    tables = {table.name: table for table in all_tables()}
    if name not in tables:
        close = difflib.get_close_matches(name, tables, n=2)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"There are: {', '.join(tables)}."
        raise ArgumentError(f"TABLE must be one that --list shows, got {name!r}. {hint}")
    return tables[name]


def _table(name: str, title: str, rows: Iterator[Row]) -> Table:
    return Table(name=name, title=title, rows=tuple(rows))


def _with(scale_norm: bool) -> str:
    return "ScaleNorm" if scale_norm else "none"


def _capacity() -> Iterator[Row]:
    for private in (True, False):
        for filters in making_the_shoe_fit.CAPACITIES:
            words = f"{filters} filters, {'private' if private else 'no privacy'}"
            yield Row(words, making_the_shoe_fit.capacity_name(filters, private=private))


def _activation() -> Iterator[Row]:
    for dataset, words in (("mnist", "MNIST"), ("fashion", "FashionMNIST")):
        for activation in ("tanh", "relu"):
            yield Row(f"{words}, {activation}", f"{dataset}-shoefit-{activation}")


def _mean_var() -> Iterator[Row]:
    yield Row("He's initialisation", "cifar10-allconv-he")
    yield Row("Mean-Var initialisation", "cifar10-allconv-meanvar")


def _adam() -> Iterator[Row]:
    for optimizer in ("sgd", "adam"):
        for factor in making_the_shoe_fit.FACTORS:
            name = making_the_shoe_fit.table5_name(optimizer, 1024, private=True, factor=factor)
            yield Row(f"{optimizer}, {factor:g} × the tuned rate", name)


def _table5() -> Iterator[Row]:
    for private in (True, False):
        for optimizer, batch, epochs in making_the_shoe_fit.TABLE5:
            words = f"{optimizer}, batch {batch}, {epochs} epochs{'' if private else ', no privacy'}"
            yield Row(words, making_the_shoe_fit.table5_name(optimizer, batch, private=private))


def _shoefit_transfer() -> Iterator[Row]:
    words = {"min10": "Min-rand-10", "half50": "Half-rand-50", "max100": "Max-100"}
    for kind in making_the_shoe_fit.FIGURES:
        for epochs, epsilon in making_the_shoe_fit.LADDER.items():
            yield Row(f"{words[kind]}, epsilon {epsilon:g}", making_the_shoe_fit.fine_tuning_name(kind, epochs))
    for epsilon in own_recipes.HEADS:
        yield Row(f"Max-100 with ResNet-9, epsilon {epsilon:g}", own_recipes.head_name(epsilon))


def _scalenorm_table1() -> Iterator[Row]:
    for dataset, by_epsilon in scalenorm.FIGURES.items():
        for epsilon in by_epsilon:
            for scale_norm in (False, True):
                words = f"{dataset}, epsilon {epsilon:g}, {_with(scale_norm)}"
                yield Row(words, f"{dataset}-{'scale' * scale_norm}resnet9-eps{epsilon:g}")


def _groups() -> Iterator[Row]:
    for start, words in (("cifar10", "ResNet-9, CIFAR-10"), ("imagenette", "ResNet-50, ImageNette")):
        depth = 9 if start == "cifar10" else 50
        for groups in scalenorm.GROUPS:
            for scale_norm in (False, True):
                count = f"{groups} groups" if groups > 1 else "1 group (LayerNorm)"
                name = f"{start}-{'scale' * scale_norm}resnet{depth}-eps7.5-groups{groups}"
                yield Row(f"{words}, {count}, {_with(scale_norm)}", name)


def _epochs() -> Iterator[Row]:
    for epochs, end in ((25, "-epochs25"), (50, ""), (90, "-epochs90")):
        yield Row(f"{epochs} epochs", f"cifar10-resnet9-eps7.5{end}")


def _mish() -> Iterator[Row]:
    for dataset in ("cifar10", "imagenette"):
        for activation, end in (("Mish", ""), ("ReLU", "-relu")):
            yield Row(f"{dataset}, {activation}", f"{dataset}-resnet9-eps7.5{end}")


def _transfer() -> Iterator[Row]:
    ways = (
        ("cifar10", "from-cifar100", "CIFAR-100 → CIFAR-10"),
        ("cifar100", "from-cifar10", "CIFAR-10 → CIFAR-100"),
        ("cifar100", "from-cifar10-eps10", "CIFAR-10, private → CIFAR-100"),
    )
    for second, end, words in ways:
        for scale_norm in (False, True):
            yield Row(f"{words}, {_with(scale_norm)}", f"{second}-{'scale' * scale_norm}resnet9-{end}")
    yield Row("CIFAR-100 from scratch, none", "cifar100-resnet9-eps10")


def _masks() -> Iterator[Row]:
    for setting, _ in scalenorm_segmentation.table_settings():
        words = f"{setting.network}, epsilon {setting.epsilon:g}, {setting.groups} groups, {_with(setting.scale_norm)}"
        yield Row(words, setting.name)


def _patients() -> Iterator[Row]:
    for setting in (*scalenorm_segmentation.patient_settings(), *scalenorm_segmentation.ordinary_settings()):
        unit = "no privacy" if setting.epsilon is None else f"patients, epsilon {setting.epsilon:g}"
        yield Row(f"{setting.network}, {unit}, {_with(setting.scale_norm)}", setting.name)


def _grid() -> Iterator[Row]:
    for batch in scalenorm.BATCHES:
        for rate in scalenorm.RATES:
            usual = (batch, rate) == (1024, 1e-3)
            end = "" if usual else f"-batch{batch}-lr{rate:g}"
            yield Row(f"batch {batch}, rate {rate:g}", f"cifar10-scaleresnet9-eps7.5{end}")


def _architectures() -> Iterator[Row]:
    for dataset in ("cifar10", "imagenette"):
        for model in smoothnets.FIGURES:
            yield Row(f"{dataset}, {model}", f"{dataset}-{model}-smoothnets-eps7")


def _components() -> Iterator[Row]:
    for component in smoothnets.COMPONENTS:
        yield Row(component.replace("-", " "), smoothnets.component_name(component))


def _ladder() -> Iterator[Row]:
    words = ("no norm", "+ GroupNorm", "+ large batch", "+ weight standardisation", "+ views", "+ averaging")
    for rung, text in enumerate(words):
        yield Row(text, through_scale.ladder_name(rung))


def _wrn() -> Iterator[Row]:
    for model, by_epsilon in through_scale.WRN.items():
        for epsilon in by_epsilon:
            yield Row(f"{model}, epsilon {epsilon:g}", f"cifar10-{model}-eps{epsilon:g}")


def _views() -> Iterator[Row]:
    for count in (1, 4, 8):
        yield Row(f"{count} view{'s' * (count > 1)}", f"cifar10-wrn16_4-views{count}-eps8")
    yield Row("16 views (4 at --scale cpu)", "cifar10-wrn16_4-eps8")


def _named(recipes: Callable[[], Iterator[Recipe]], source: str) -> Iterator[Row]:
    for recipe in recipes():
        if recipe.source == source:
            yield Row(recipe.name, recipe.name)
