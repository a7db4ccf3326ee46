"""The tables and figures of the papers that ``dpvision reproduce`` can run again, as data: rows that are recipes.

A table whose paper has a figure says how it is drawn (``Plot``), and each of its rows where it lies in it. Points of
other works that have no recipe are data of the plot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Final, Literal, final

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

Kind = Literal["over", "epochs", "epsilon", "noise", "heat"]
NONE, SCALE = "none", "ScaleNorm"
_BOTH: Final = ((False, NONE), (True, SCALE))


@final
@dataclass(frozen=True)
class Row:
    """One row of a table: its label, the name of its recipe (and the row's), and its place in the table's figure."""

    label: str
    name: str
    series: str = ""
    x: float | None = None

    @property
    def recipe(self) -> Recipe:
        """The recipe that is run."""
        return find_recipe(self.name)


@final
@dataclass(frozen=True, kw_only=True)
class Plot:
    """How a table is drawn.

    Attributes:
        kind: ``over``: accuracy over the rows' ``x``, a line for each series; ``epochs`` and ``epsilon``: the curve of
            each row over training; ``noise``: accuracy over the noise multiplier of the runs, a line for each series;
            ``heat``: a cell for each series (row) and ``x`` (column).
        x: what the x axis, or a heat map's columns, shows.
        series: what a heat map's rows show.
        log_x: whether the x axis is logarithmic.
        published: other works as (name, x, accuracy in percent).
    """

    kind: Kind
    x: str
    series: str = ""
    log_x: bool = False
    published: tuple[tuple[str, float, float], ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """A paper's table or figure."""

    name: str
    title: str
    rows: tuple[Row, ...]
    plot: Plot | None = None

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
    return (*_shoefit(), *_scalenorm(), *_smoothnets(), *_through_scale(), *_ours())


def _table(name: str, title: str, rows: Iterable[Row], plot: Plot | None = None) -> Table:
    return Table(name=name, title=title, rows=tuple(rows), plot=plot)


def _curves(rows: Iterable[Row]) -> Iterator[Row]:
    """Name the series of each row by its label, for plots of curves."""
    return (replace(row, series=row.label) for row in rows)


_OVER_EPOCHS: Final = Plot(kind="epochs", x="epochs")


def _shoefit() -> Iterator[Table]:
    shoe, paper = making_the_shoe_fit, "Making the shoe fit"
    for dataset, words, end in (("mnist", "MNIST", ""), ("fashion", "FashionMNIST", "-fashion")):
        yield _table(
            f"shoefit-capacity{end}",
            f"{paper}, Figure 1: filters, {words}, sigma 1.1",
            (
                Row(
                    f"{filters} filters, {series}",
                    shoe.capacity_name(filters, private=private, dataset=dataset),
                    series,
                    filters,
                )
                for private, series in ((True, "private"), (False, "no privacy"))
                for filters in shoe.CAPACITIES
            ),
            Plot(kind="over", x="filters"),
        )
    names = (("mnist", "MNIST"), ("fashion", "FashionMNIST"))
    yield _table(
        "shoefit-activation",
        f"{paper}, Figure 2: tanh, ReLU and sigmoid",
        _curves(
            Row(f"{words}, {activation}", f"{dataset}-shoefit-{activation}")
            for dataset, words in names
            for activation in ("tanh", "relu", "sigmoid")
        ),
        Plot(kind="epsilon", x="epsilon"),
    )
    yield _table(
        "shoefit-plain",
        f"{paper}, section 3.2: the same networks without privacy",
        (
            Row(f"{words}, {activation}, no privacy", shoe.plain_name(dataset, activation))
            for dataset, words in names
            for activation in ("tanh", "relu")
        ),
    )
    yield _table(
        "meanvar",
        f"{paper}, Figure 4: Mean-Var initialisation",
        _curves(
            (
                Row("He's initialisation", "cifar10-allconv-he"),
                Row("Mean-Var, source with noise 0.001", "cifar10-allconv-meanvar"),
                Row("Mean-Var, source at epsilon 1", "cifar10-allconv-meanvar-charged"),
            )
        ),
        _OVER_EPOCHS,
    )
    yield _table(
        "shoefit-figure5",
        f"{paper}, Figure 5: learning curves of SGD and Adam",
        _curves(
            Row(f"{words}, {optimizer}", shoe.curve_name(dataset, optimizer))
            for dataset, words in (*names, ("cifar10", "CIFAR-10"))
            for optimizer in ("sgd", "adam")
        ),
        _OVER_EPOCHS,
    )
    yield _table(
        "shoefit-adam",
        f"{paper}: SGD and Adam at three rates, FashionMNIST",
        (
            Row(
                f"{optimizer}, {factor:g} × the tuned rate",
                shoe.table5_name(optimizer, 1024, private=True, factor=factor),
                optimizer,
                factor,
            )
            for optimizer in ("sgd", "adam")
            for factor in shoe.FACTORS
        ),
        Plot(kind="over", x="multiple of the tuned rate", log_x=True),
    )
    yield _table(
        "shoefit-table5",
        f"{paper}, Table 5: batch, epochs and optimizer, FashionMNIST",
        (
            Row(
                f"{optimizer}, batch {batch}, {epochs} epochs{'' if private else ', no privacy'}",
                shoe.table5_name(optimizer, batch, private=private),
            )
            for private in (True, False)
            for optimizer, batch, epochs in shoe.TABLE5
        ),
    )
    yield _shoefit_transfer()
    yield _table(
        "shoefit-last-layer",
        f"{paper}, section 4.1: a last layer of ten times as many inputs",
        (
            Row(
                f"{hidden or 1024:,} inputs, epsilon {shoe.LADDER[epochs]:g}",
                shoe.fine_tuning_name("max100", epochs, hidden),
                f"{hidden or 1024:,} inputs",
                shoe.LADDER[epochs],
            )
            for hidden in (None, shoe.HIDDEN)
            for epochs in (100, 400)
        ),
        Plot(kind="over", x="epsilon"),
    )
    yield _table(
        "shoefit-summary",
        f"{paper}, section 6: the summary",
        (
            Row("MNIST, SGD with tanh, no privacy", shoe.plain_name("mnist", "tanh")),
            Row("MNIST, DP-SGD with ReLU", "mnist-shoefit-relu"),
            Row("MNIST, DP-SGD with tanh", "mnist-shoefit-tanh"),
            Row("FashionMNIST, SGD with ReLU, no privacy", shoe.plain_name("fashion", "relu")),
            Row("FashionMNIST, DP-SGD with ReLU", "fashion-shoefit-relu"),
            Row("FashionMNIST, DP-SGD with tanh", "fashion-shoefit-tanh"),
            Row("CIFAR-10, transfer, no privacy", "cifar10-shoefit-from-max100-no-privacy"),
            Row("CIFAR-10, transfer, DP-SGD", shoe.fine_tuning_name("max100", 400)),
        ),
    )


def _shoefit_transfer() -> Table:
    """Tables 3 and 4 in one, with a larger network of ours."""
    shoe = making_the_shoe_fit
    ours = "Max-100 with ResNet-9"
    published = tuple(("Abadi et al. 2016", epsilon, accuracy) for epsilon, accuracy in shoe.ABADI)
    rows = (
        *(
            Row(f"{words}, epsilon {epsilon:g}", shoe.fine_tuning_name(kind, epochs), words, epsilon)
            for kind, words in (("min10", "Min-rand-10"), ("half50", "Half-rand-50"), ("max100", "Max-100"))
            for epochs, epsilon in shoe.LADDER.items()
        ),
        *(
            Row(f"{ours}, epsilon {epsilon:g}", own_recipes.head_name(epsilon), ours, epsilon)
            for epsilon in own_recipes.HEADS
        ),
    )
    title = "Making the shoe fit, Tables 3 and 4: last layer on CIFAR-10 after CIFAR-100"
    return _table("shoefit-transfer", title, rows, Plot(kind="over", x="epsilon", published=published))


def _scalenorm() -> Iterator[Table]:
    thesis, paper = "ScaleNorm thesis", "ScaleNorm paper"
    yield _table(
        "scalenorm-table1",
        f"{thesis}, Table 5.4: ScaleNorm against none",
        (
            *(
                Row(f"{dataset}, epsilon {epsilon:g}, {norm}", f"{dataset}-{'scale' * scale}resnet9-eps{epsilon:g}")
                for dataset, by_epsilon in scalenorm.FIGURES.items()
                for epsilon in by_epsilon
                for scale, norm in _BOTH
            ),
            *(
                Row(f"imagenette, ResNet-50, {norm}", f"imagenette-{'scale' * scale}resnet50-eps7.5-groups1")
                for scale, norm in _BOTH
            ),
        ),
    )
    yield _table(
        "scalenorm-paper",
        f"{paper}, Tables 1, 3 and 4: ScaleNorm against none at the epsilons that it prints",
        (
            *(
                Row(f"{dataset}, epsilon {epsilon:g}, {norm}", f"{dataset}-{'scale' * scale}resnet9-eps{epsilon:g}")
                for dataset, by_epsilon in (*scalenorm.PAPER_FIGURES.items(), ("tiny", scalenorm.FIGURES["tiny"]))
                for epsilon in by_epsilon
                for scale, norm in _BOTH
            ),
            *(
                Row(f"imagenette, ResNet-50, {norm}", f"imagenette-{'scale' * scale}resnet50-eps7.42-groups1")
                for scale, norm in _BOTH
            ),
        ),
    )
    yield _table(
        "scalenorm-figure3.3",
        f"{thesis}, Figure 3.3 (paper, Figure 3): accuracy over training at epsilon 10",
        _curves(
            Row(f"{dataset}, {norm}", f"{dataset}-{'scale' * scale}resnet9-eps10")
            for dataset in ("imagenette", "cifar10")
            for scale, norm in _BOTH
        ),
        _OVER_EPOCHS,
    )
    yield _table(
        "scalenorm-wide",
        f"{paper}, Table 2: WRN-16-4 and ResNet-9, CIFAR-10",
        (
            *(Row(f"WRN-16-4, {norm}", f"cifar10-{'scale' * scale}wrn16_4-plain-eps8") for scale, norm in _BOTH),
            *(Row(f"ResNet-9, {norm}", f"cifar10-{'scale' * scale}resnet9-eps7.42") for scale, norm in _BOTH),
        ),
    )
    yield _table(
        "scalenorm-plain",
        f"{paper}, Appendix B: BatchNorm without privacy, CIFAR-10",
        _curves(Row(norm, f"cifar10-{'scale' * scale}resnet9-no-privacy-batch") for scale, norm in _BOTH),
        _OVER_EPOCHS,
    )
    yield _table(
        "scalenorm-order",
        f"{paper}, Appendix C: activation before or after the norm, CIFAR-10 at epsilon 7.5",
        (
            Row(f"{words}, {norm}", f"cifar10-{'scale' * scale}resnet9-eps7.5{end}")
            for words, end in (("norm first", ""), ("activation first", "-act_norm"))
            for scale, norm in _BOTH
        ),
    )
    for number, dataset in (("5.3", "imagenette"), ("A.1", "cifar10"), ("A.2", "tiny")):
        yield _table(
            f"groups-table{number}",
            f"{thesis}, Table {number}: LayerNorm, numbers of groups, InstanceNorm, {dataset}",
            _by_groups(dataset),
            Plot(kind="heat", x="groups (1: LayerNorm, 0: InstanceNorm)", series="network"),
        )
    yield _table(
        "epochs-table5.1",
        f"{thesis}, Table 5.1: epochs, CIFAR-10 at epsilon 7.5",
        (
            Row(f"{epochs} epochs", f"cifar10-resnet9-eps7.5{'' if epochs == 50 else f'-epochs{epochs}'}", "", epochs)
            for epochs in (25, 50, 90)
        ),
        Plot(kind="over", x="epochs"),
    )
    yield _table(
        "activation-table5.2",
        f"{thesis}, Table 5.2: Mish against ReLU at epsilon 7.5",
        (
            Row(f"{dataset}, {activation}", f"{dataset}-resnet9-eps7.5{end}")
            for dataset in ("cifar10", "imagenette")
            for activation, end in (("Mish", ""), ("ReLU", "-relu"))
        ),
    )
    yield _table(
        "batch-lr-grid",
        f"{thesis}, Figure 5.1: batch size × learning rate, ResNet-9, CIFAR-10, 25 epochs at epsilon 7.5",
        (
            Row(f"batch {batch}, rate {rate:g}", scalenorm.grid_setting(batch, rate).name, f"{rate:g}", batch)
            for batch in scalenorm.BATCHES
            for rate in scalenorm.RATES
        ),
        Plot(kind="heat", x="batch size", series="learning rate"),
    )
    yield _table("transfer-table5.5", f"{thesis}, Table 5.5: transfer at epsilon 10", _transfer_rows())
    yield _table(
        "scalenorm-table6.1",
        f"{thesis}, Table 6.1: liver CT, Dice",
        (
            Row(f"{each.network}, epsilon {each.epsilon:g}, {each.groups} groups, {each.norm}", each.name)
            for each, _ in scalenorm_segmentation.TABLE
        ),
    )
    yield _table(
        "scalenorm-liver-text",
        f"{thesis}, section 6.2: liver CT with the text's learning rate and schedule, Dice",
        (
            Row(f"{each.network}, {each.norm}", each.name, f"{each.network}, {each.norm}")
            for each, _ in scalenorm_segmentation.AS_TEXT
        ),
        _OVER_EPOCHS,
    )


def _by_groups(dataset: str) -> Iterator[Row]:
    """Rows of Tables 5.3, A.1 and A.2, with InstanceNorm, which the thesis names beside them, in the column 0."""
    found = [(depth, e) for (name, depth), by in scalenorm.GROUP_FIGURES.items() if name == dataset for e in by]
    for depth, epsilon in found or [(9, epsilon) for epsilon in scalenorm.TINY_GROUP_FIGURES]:
        for scale, norm in _BOTH:
            series = f"ResNet-{depth}, epsilon {epsilon:g}, {norm}"
            name = f"{dataset}-{'scale' * scale}resnet{depth}-eps{epsilon:g}"
            for groups in scalenorm.GROUPS:
                words = f"{groups} groups" if groups > 1 else "1 group (LayerNorm)"
                yield Row(f"{series}, {words}", f"{name}-groups{groups}", series, groups)
            yield Row(f"{series}, InstanceNorm", f"{name}-instance", series, 0)


def _transfer_rows() -> Iterator[Row]:
    for second, first, words in (
        ("cifar10", "cifar100", "CIFAR-100 → CIFAR-10"),
        ("cifar100", "cifar10", "CIFAR-10 → CIFAR-100"),
        ("cifar100", "cifar10-eps10", "CIFAR-10, private → CIFAR-100"),
    ):
        yield from (Row(f"{words}, {norm}", f"{second}-{'scale' * scale}resnet9-from-{first}") for scale, norm in _BOTH)
        parts = {"head": "BatchNorm, the head alone", "last": "BatchNorm put into GroupNorm"}
        for trained in scalenorm.BATCH_NORM_USES if first in ("cifar10", "cifar100") else ():
            yield Row(f"{words}, {parts[trained]}", f"{second}-resnet9-from-{first}-batch-{trained}")
    yield Row("CIFAR-100 from scratch, none", "cifar100-resnet9-eps10")


def _smoothnets() -> Iterator[Table]:
    yield _table(
        "smoothnet-table1",
        "SmoothNets, Table 1: other works",
        (
            Row("Papernot et al. 2020, CIFAR-10", "cifar10-tempered-eps7.53"),
            Row("Klause et al. 2022, CIFAR-10", "cifar10-scaleresnet9-eps7.5"),
            Row("Dörmann et al. 2021, CIFAR-10", "cifar10-doermann-eps7.42"),
            Row("De et al. 2022, CIFAR-10", "cifar10-wrn40_4-eps8"),
            Row("Klause et al. 2022, ImageNette", "imagenette-scaleresnet9-eps7.5"),
        ),
    )
    yield _table(
        "smoothnet-table2",
        "SmoothNets, Table 2: architectures at epsilon 7",
        (
            Row(f"{dataset}, {model}", smoothnets.benchmark_name(dataset, model))
            for dataset in ("cifar10", "imagenette")
            for model in smoothnets.FIGURES
        ),
    )
    yield _table(
        "smoothnet-figure2",
        "SmoothNets, Figure 2: the Pareto front, CIFAR-10",
        (
            Row(f"SmoothNet, epsilon {e:g}", smoothnets.benchmark_name("cifar10", "smoothnet", e), "SmoothNet", e)
            for e in smoothnets.PARETO
        ),
        Plot(kind="over", x="epsilon", published=smoothnets.OTHER_WORKS),
    )
    for private, words, end in ((True, "at epsilon 7", ""), (False, "without privacy", "-plain")):
        yield _table(
            f"smoothnet-components{end}",
            f"SmoothNets: components, CIFAR-10 {words}",
            (
                Row(name.replace("-", " "), smoothnets.component_name(name, private=private))
                for name in smoothnets.COMPONENTS
            ),
        )
    yield _table(
        "smoothnet-norms",
        "SmoothNets: norms, CIFAR-10 at epsilon 7",
        (
            Row(words, smoothnets.component_name(name))
            for words, name in (
                ("GroupNorm, 8 groups", "whole"),
                ("LayerNorm", "layer-norm"),
                ("InstanceNorm", "instance-norm"),
                ("none", "no-norm"),
            )
        ),
    )
    yield _table(
        "smoothnet-ratio",
        "SmoothNets: width against depth at equal size, CIFAR-10",
        (
            Row(
                f"depth {depth}, width {width:g}, {series}",
                smoothnets.ratio_name(depth, private=private),
                series,
                width / depth,
            )
            for private, series in ((True, "epsilon 7"), (False, "no privacy"))
            for depth, width in smoothnets.RATIOS.items()
        ),
        Plot(kind="over", x="width / depth", log_x=True),
    )


def _through_scale() -> Iterator[Table]:
    wrn = through_scale
    rungs = ("no norm", "+ GroupNorm", "+ large batch", "+ weight standardisation", "+ views", "+ averaging")
    for model, end in zip(wrn.LADDER_MODELS, ("", "-wrn16_4"), strict=True):
        yield _table(
            f"de-ablation{end}",
            f"De et al.: the ladder with {model.replace('wrn', 'WRN-').replace('_', '-')}, CIFAR-10 at epsilon 8",
            (Row(words, wrn.ladder_name(rung, model)) for rung, words in enumerate(rungs)),
        )
    yield _table(
        "de-cifar10",
        "De et al.: CIFAR-10 from scratch, over epsilon",
        (
            Row(f"{model}, epsilon {epsilon:g}", f"cifar10-{model}-eps{epsilon:g}", model, epsilon)
            for model, by_epsilon in wrn.WRN.items()
            for epsilon in by_epsilon
        ),
        Plot(kind="over", x="epsilon", published=wrn.OTHER_FROM_SCRATCH),
    )
    yield _table(
        "de-imagenet",
        "De et al.: ImageNet from scratch",
        (
            Row("Kurakin et al., ResNet-18", "imagenet-resnet18-kurakin-eps13.2"),
            Row("NF-ResNet-50", "imagenet-nf_resnet50-eps8"),
        ),
    )
    parts = {"head": "classifier", "all": "all layers"}
    yield _table(
        "de-finetuning",
        "De et al.: fine-tuning on CIFAR-10 after ImageNet at 32 px",
        (
            Row(f"{parts[trained]}, epsilon {e:g}", f"cifar10-wrn28_10-{trained}-eps{e:g}", parts[trained], e)
            for trained, by_epsilon in wrn.FINE_TUNING.items()
            for e in by_epsilon
        ),
        Plot(kind="over", x="epsilon", published=wrn.OTHER_FINE_TUNING),
    )
    jft = [(each[0].name, each[1], each[2], each[3]) for each in wrn.JFT]
    for name, title, model, dataset in (
        ("de-jft-resnets", "De et al.: ImageNet after JFT-300M, NF-ResNets, epsilon 8", "nf_resnet", "imagenet"),
        ("de-nfnet", "De et al.: ImageNet after JFT-4B, NFNet-F3", "nfnet_f3", "imagenet"),
        ("de-places", "De et al.: Places365 after JFT-300M, NF-ResNet-50", "nf_resnet50", "places365"),
    ):
        rows = [each for each in jft if each[0] == dataset and each[1].startswith(model)]
        yield _table(
            name,
            title,
            (
                Row(
                    f"{each[1]}, {parts[each[2]]}, {'no privacy' if each[3] is None else f'epsilon {each[3]:g}'}",
                    wrn.jft_name(*each),
                )
                for each in rows
            ),
        )
    yield _table(
        "de-pretraining",
        "De et al.: better pre-training, better results; here on public data, CIFAR-10 at epsilon about 1",
        (
            Row(words, name, "epsilon about 1", x)
            for words, name, x in (
                ("5,000 images of 10 classes", making_the_shoe_fit.fine_tuning_name("min10", 100), 5_000),
                ("25,000 images of 50 classes", making_the_shoe_fit.fine_tuning_name("half50", 100), 25_000),
                ("CIFAR-100", making_the_shoe_fit.fine_tuning_name("max100", 100), 50_000),
                ("ImageNet, another network", "cifar10-efficientnet_lite0-head192-eps1", 1_281_167),
            )
        ),
        Plot(kind="over", x="images of the pre-training", log_x=True),
    )
    points = [
        Row(f"batch {batch}, {epochs} epochs", wrn.compute_name(batch, epochs), f"batch {batch}", epochs)
        for batch in wrn.COMPUTE_BATCHES
        for epochs in wrn.COMPUTE_EPOCHS
    ]
    title = "De et al.: accuracy over {} at each batch size, CIFAR-10 at epsilon 8"
    yield _table("de-noise", title.format("noise"), points, Plot(kind="noise", x="noise multiplier", log_x=True))
    yield _table("de-compute", title.format("epochs"), points, Plot(kind="over", x="epochs", log_x=True))
    yield _table(
        "de-rates",
        "De et al.: learning rates at each batch size, CIFAR-10 at epsilon 8",
        (
            Row(f"batch {batch}, rate {rate:g}", wrn.rate_name(batch, rate), f"{rate:g}", batch)
            for batch in wrn.RATE_BATCHES
            for rate in wrn.SEARCHED_RATES
        ),
        Plot(kind="heat", x="batch size", series="learning rate"),
    )
    yield _table(
        "de-views",
        "De et al.: numbers of views, CIFAR-10 at epsilon 8",
        (
            *(Row(f"{n} view{'s' * (n > 1)}", f"cifar10-wrn16_4-views{n}-eps8", "WRN-16-4", n) for n in (1, 4, 8)),
            Row("16 views (4 at --scale cpu)", "cifar10-wrn16_4-eps8", "WRN-16-4", 16),
        ),
        Plot(kind="over", x="views", log_x=True),
    )


def _ours() -> Iterator[Table]:
    segmentation = scalenorm_segmentation
    yield _table(
        "liver-patients",
        "Liver CT: patients as units, and no privacy, Dice",
        (
            *(
                Row(f"{each.network}, patients, epsilon {each.epsilon:g}, {each.norm}", each.name)
                for each in segmentation.PATIENT_SETTINGS
            ),
            *(Row(f"{each.network}, no privacy, {each.norm}", each.name) for each in segmentation.ORDINARY_SETTINGS),
        ),
    )
    yield _table("scattering", "Fixed wavelet features", _of_source(own_recipes.SOURCE))
    yield _table("public-features", "CIFAR-10 on public features", _of_source(own_recipes.PUBLIC))


def _of_source(source: str) -> Iterable[Row]:
    return (Row(each.name, each.name) for each in own_recipes.feature_recipes() if each.source == source)


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
