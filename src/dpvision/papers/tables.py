"""The tables and figures of the papers that ``dpvision reproduce`` can run again, as data: rows that are recipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import final

from dpvision.errors import ArgumentError, did_you_mean
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
    """One row of a table: its label, and the name of its recipe, which is also the row's name."""

    label: str
    name: str

    @property
    def recipe(self) -> Recipe:
        """The recipe that is run."""
        return find_recipe(self.name)


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """A paper's table or figure."""

    name: str
    title: str
    rows: tuple[Row, ...]

    def choose(self, patterns: Sequence[str]) -> tuple[Row, ...]:
        """Return the rows that match.

        Args:
            patterns: Names of rows; ``*`` matches anything. Empty: all rows.

        Raises:
            ArgumentError: A pattern matches no row.
        """
        if not patterns:
            return self.rows
        for pattern in patterns:
            if not any(fnmatchcase(row.name, pattern) for row in self.rows):
                names = ", ".join(row.name for row in self.rows)
                raise ArgumentError(f"--rows must name rows of {self.name}, got {pattern!r}. There are: {names}.")
        return tuple(row for row in self.rows if any(fnmatchcase(row.name, pattern) for pattern in patterns))


@cache
def all_tables() -> tuple[Table, ...]:
    """Return every table, paper by paper."""
    shoe, wrn = making_the_shoe_fit, through_scale
    both = ((False, "none"), (True, "ScaleNorm"))
    rows: dict[tuple[str, str], Iterable[tuple[str, str]]] = {
        ("shoefit-capacity", "Making the shoe fit, Figure 1: filters, MNIST"): (
            (
                f"{filters} filters, {'private' if private else 'no privacy'}",
                shoe.capacity_name(filters, private=private),
            )
            for private in (True, False)
            for filters in shoe.CAPACITIES
        ),
        ("shoefit-activation", "Making the shoe fit, Figure 2: tanh against ReLU"): (
            (f"{words}, {activation}", f"{dataset}-shoefit-{activation}")
            for dataset, words in (("mnist", "MNIST"), ("fashion", "FashionMNIST"))
            for activation in ("tanh", "relu")
        ),
        ("meanvar", "Making the shoe fit, Figure 4: Mean-Var initialisation"): (
            ("He's initialisation", "cifar10-allconv-he"),
            ("Mean-Var initialisation", "cifar10-allconv-meanvar"),
        ),
        ("shoefit-adam", "Making the shoe fit, Figure 5: SGD and Adam at three rates, FashionMNIST"): (
            (
                f"{optimizer}, {factor:g} × the tuned rate",
                shoe.table5_name(optimizer, 1024, private=True, factor=factor),
            )
            for optimizer in ("sgd", "adam")
            for factor in shoe.FACTORS
        ),
        ("shoefit-table5", "Making the shoe fit, Table 5: batch, epochs and optimizer, FashionMNIST"): (
            (
                f"{optimizer}, batch {batch}, {epochs} epochs{'' if private else ', no privacy'}",
                shoe.table5_name(optimizer, batch, private=private),
            )
            for private in (True, False)
            for optimizer, batch, epochs in shoe.TABLE5
        ),
        ("shoefit-transfer", "Making the shoe fit: last layer on CIFAR-10 after CIFAR-100"): (
            *(
                (f"{words}, epsilon {epsilon:g}", shoe.fine_tuning_name(kind, epochs))
                for kind, words in (("min10", "Min-rand-10"), ("half50", "Half-rand-50"), ("max100", "Max-100"))
                for epochs, epsilon in shoe.LADDER.items()
            ),
            *(
                (f"Max-100 with ResNet-9, epsilon {epsilon:g}", own_recipes.head_name(epsilon))
                for epsilon in own_recipes.HEADS
            ),
        ),
        ("scalenorm-table1", "ScaleNorm against none"): (
            (f"{dataset}, epsilon {epsilon:g}, {norm}", f"{dataset}-{'scale' * scale}resnet9-eps{epsilon:g}")
            for dataset, by_epsilon in scalenorm.FIGURES.items()
            for epsilon in by_epsilon
            for scale, norm in both
        ),
        ("scalenorm-groups", "ScaleNorm: numbers of groups at epsilon 7.5"): (
            (
                f"{words}, {f'{groups} groups' if groups > 1 else '1 group (LayerNorm)'}, {norm}",
                f"{dataset}-{'scale' * scale}resnet{depth}-eps7.5-groups{groups}",
            )
            for dataset, depth, words in (
                ("cifar10", 9, "ResNet-9, CIFAR-10"),
                ("imagenette", 50, "ResNet-50, ImageNette"),
            )
            for groups in scalenorm.GROUPS
            for scale, norm in both
        ),
        ("epochs-table5.1", "ScaleNorm thesis, Table 5.1: epochs, CIFAR-10 at epsilon 7.5"): (
            (f"{epochs} epochs", f"cifar10-resnet9-eps7.5{'' if epochs == 50 else f'-epochs{epochs}'}")
            for epochs in (25, 50, 90)
        ),
        ("activation-table5.2", "ScaleNorm thesis, Table 5.2: Mish against ReLU at epsilon 7.5"): (
            (f"{dataset}, {activation}", f"{dataset}-resnet9-eps7.5{end}")
            for dataset in ("cifar10", "imagenette")
            for activation, end in (("Mish", ""), ("ReLU", "-relu"))
        ),
        ("transfer-table5.5", "ScaleNorm thesis, Table 5.5: transfer at epsilon 10"): (
            *(
                (f"{words}, {norm}", f"{second}-{'scale' * scale}resnet9-from-{first}")
                for second, first, words in (
                    ("cifar10", "cifar100", "CIFAR-100 → CIFAR-10"),
                    ("cifar100", "cifar10", "CIFAR-10 → CIFAR-100"),
                    ("cifar100", "cifar10-eps10", "CIFAR-10, private → CIFAR-100"),
                )
                for scale, norm in both
            ),
            ("CIFAR-100 from scratch, none", "cifar100-resnet9-eps10"),
        ),
        ("scalenorm-table6.1", "ScaleNorm thesis, Table 6.1: liver CT, Dice"): (
            (f"{each.network}, epsilon {each.epsilon:g}, {each.groups} groups, {each.norm}", each.name)
            for each, _ in scalenorm_segmentation.TABLE
        ),
        ("liver-patients", "Liver CT: patients as units, and no privacy, Dice"): (
            *(
                (f"{each.network}, patients, epsilon {each.epsilon:g}, {each.norm}", each.name)
                for each in scalenorm_segmentation.PATIENT_SETTINGS
            ),
            *(
                (f"{each.network}, no privacy, {each.norm}", each.name)
                for each in scalenorm_segmentation.ORDINARY_SETTINGS
            ),
        ),
        ("batch-lr-grid", "ScaleResNet-9 on CIFAR-10 at epsilon 7.5: batch size × learning rate"): (
            (
                f"batch {batch}, rate {rate:g}",
                f"cifar10-scaleresnet9-eps7.5{'' if (batch, rate) == (1024, 1e-3) else f'-batch{batch}-lr{rate:g}'}",
            )
            for batch in scalenorm.BATCHES
            for rate in scalenorm.RATES
        ),
        ("smoothnet-table2", "SmoothNets, Table 2: architectures at epsilon 7"): (
            (f"{dataset}, {model}", f"{dataset}-{model}-smoothnets-eps7")
            for dataset in ("cifar10", "imagenette")
            for model in smoothnets.FIGURES
        ),
        ("smoothnet-components", "SmoothNets: components, CIFAR-10 at epsilon 7"): (
            (name.replace("-", " "), smoothnets.component_name(name)) for name in smoothnets.COMPONENTS
        ),
        ("de-ablation", "De et al., Table 1: the ladder, CIFAR-10 at epsilon 8"): (
            (words, wrn.ladder_name(rung))
            for rung, words in enumerate(
                ("no norm", "+ GroupNorm", "+ large batch", "+ weight standardisation", "+ views", "+ averaging")
            )
        ),
        ("de-cifar10", "De et al.: CIFAR-10 from scratch"): (
            (f"{model}, epsilon {epsilon:g}", f"cifar10-{model}-eps{epsilon:g}")
            for model, by_epsilon in wrn.WRN.items()
            for epsilon in by_epsilon
        ),
        ("de-views", "De et al.: numbers of views, CIFAR-10 at epsilon 8"): (
            *((f"{count} view{'s' * (count > 1)}", f"cifar10-wrn16_4-views{count}-eps8") for count in (1, 4, 8)),
            ("16 views (4 at --scale cpu)", "cifar10-wrn16_4-eps8"),
        ),
        ("scattering", "Fixed wavelet features"): _of_source(own_recipes.SOURCE),
        ("public-features", "CIFAR-10 on public features"): _of_source(own_recipes.PUBLIC),
    }
    return tuple(
        Table(name=name, title=title, rows=tuple(Row(*row) for row in found)) for (name, title), found in rows.items()
    )


def _of_source(source: str) -> Iterable[tuple[str, str]]:
    return ((each.name, each.name) for each in own_recipes.feature_recipes() if each.source == source)


def find_table(name: str) -> Table:
    """Return the table of that name.

    Args:
        name: Name as ``dpvision reproduce --list`` shows it.

    Raises:
        ArgumentError: There is no such table; the message suggests similar names.
    """
    tables = {table.name: table for table in all_tables()}
    if name not in tables:
        raise ArgumentError(f"TABLE must be one that --list shows, got {name!r}. {did_you_mean(name, tables)}")
    return tables[name]
