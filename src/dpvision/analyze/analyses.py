"""The analyses of ``dpvision analyze`` by name: what each computes for one run, and how runs are drawn together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpvision.analyze.activations import Distribution, activation_distributions, activation_norms
from dpvision.analyze.analysed_run import UNSAFE_STAMP, AnalysedRun
from dpvision.analyze.figures import COLOURS, Chart, Line, curve_chart, write_chart
from dpvision.analyze.gradient_signal import GradientStatistics, gradient_statistics
from dpvision.analyze.hessian import HessianProduct, hutchinson_trace, lanczos_density, largest_eigenvalues
from dpvision.analyze.loss_surface import loss_slice, random_direction
from dpvision.analyze.watch import WATCH_FILE, read_watch, watch_charts
from dpvision.errors import ArgumentError, PrivacyError, brief

ANALYSES: Final = ("activations", "norms", "gradients", "hessian", "surface", "watch")
_PATH_NAMES: Final = {"V_F": "convolutional path", "V_R": "residual path", "V_A": "sum", "V_AS": "after ScaleNorm"}
_OFFSETS: Final = tuple(np.linspace(-1.0, 1.0, 21).tolist())


@final
@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work the Hessian takes; every number is part of the results.

    Attributes:
        eigenvalues: eigenvalues of largest magnitude, by power iteration.
        iterations: most iterations for each.
        probes: most probes of the trace.
        lanczos: Lanczos steps.
        seed: of all random starts and directions.
    """

    eigenvalues: int = 3
    iterations: int = 30
    probes: int = 30
    lanczos: int = 30
    seed: int = 0


def parse_analyses(text: str) -> tuple[str, ...]:
    """Return the analyses that a list names, in the order of ``ANALYSES``.

    Raises:
        ArgumentError: a name is unknown.
    """
    asked = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in asked if name not in ANALYSES]
    if unknown or not asked:
        raise ArgumentError(f"--what must name some of {', '.join(ANALYSES)}, separated by commas, got {brief(text)}.")
    return tuple(name for name in ANALYSES if name in asked)


def analyze_runs(
    runs: Sequence[AnalysedRun],
    *,
    what: Sequence[str],
    output: Path,
    effort: Effort | None = None,
    watched: Sequence[tuple[str, Path]] = (),
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Analyse some runs and write figures that show them together.

    Args:
        runs: runs with their images; may be empty if only ``watch`` is asked for.
        what: names of ``ANALYSES``.
        output: folder for the files: NAME.png, NAME.svg, NAME.csv and NAME.json each.
        effort: of the Hessian.
        watched: name and watch file of each run, for ``watch``.
        say: receives a line of progress.

    Returns:
        The results by analysis, and the files.

    Raises:
        ArgumentError: an analysis does not apply to a run.
        PrivacyError: results on private images were to be written outside ``private/``.

    Guarantee: a function of the runs' weights and images. Results on private images are named ``unsafe_``, stamped and
    written only into their run's ``private/``, readable by its owner only.
    """
    unsafe = any(run.unsafe for run in runs)
    stamps = list(dict.fromkeys(stamp for run in runs for stamp in run.stamps))
    _require_private(runs, output)
    effort, tell = effort or Effort(), say or (lambda _: None)
    results: dict[str, Any] = {"runs": [run.facts() for run in runs], "stamps": stamps}
    charts: list[Chart] = []
    makers: dict[str, Callable[[], tuple[list[Chart], Any]]] = {
        "activations": lambda: _activations(runs),
        "norms": lambda: _norms(runs),
        "gradients": lambda: _gradients(runs),
        "hessian": lambda: _hessian(runs, effort, tell),
        "surface": lambda: _surface(runs, effort),
        "watch": lambda: _watch(watched),
    }
    for name in what:
        tell(f"{name} …")
        made, values = makers[name]()
        charts += made
        results[name] = values
    facts = {"runs": results["runs"]}
    files: list[Path] = []
    for chart in charts:
        named = Chart(**{**chart.__dict__, "name": f"unsafe_{chart.name}"}) if unsafe else chart
        own = Chart(**{**named.__dict__, "values": {**facts, **named.values}})
        files += write_chart(output, own, stamps=stamps, mode=0o600 if unsafe else 0o644)
    return {**results, "files": [str(path) for path in files]}


def _require_private(runs: Sequence[AnalysedRun], output: Path) -> None:
    """Refuse to write results on private images anywhere but into their run's ``private/``."""
    for run in runs:
        if run.private_folder is not None and output.resolve() != run.private_folder.resolve():
            raise PrivacyError(f"{UNSAFE_STAMP} They belong in {run.private_folder}, got {output}.")


def _activations(runs: Sequence[AnalysedRun]) -> tuple[list[Chart], Any]:
    """One figure per block: a panel per path, the runs overlaid, as in the ScaleNorm papers."""
    found = [(run.name, activation_distributions(run.model, run.inputs)) for run in runs]
    names = list(dict.fromkeys(each.join.name for _, values in found for each in values))
    charts = [_histograms(name, found) for name in names]
    values = {name: [each.to_dict() for each in parts] for name, parts in found}
    return charts, {
        name: [{key: value for key, value in each.items() if key not in ("edges", "counts")} for each in parts]
        for name, parts in values.items()
    }


def _histograms(block: str, found: Sequence[tuple[str, Sequence[Distribution]]]) -> Chart:
    own = [(name, [each for each in parts if each.join.name == block]) for name, parts in found]
    paths = [p for p in _PATH_NAMES if any(each.path == p for _, parts in own for each in parts)]
    kind = next(each.join.kind for _, parts in own for each in parts)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(paths), squeeze=False)[0]
        for panel, path in zip(panels, paths, strict=True):
            axes: Axes = panel
            for index, (name, parts) in enumerate(own):
                for each in (each for each in parts if each.path == path):
                    text = f"{name}: mean {each.mean:.2f}, std {each.std:.2f}, skew {each.skew:.2f}"
                    density = np.array(each.counts) / max(1, sum(each.counts)) / (each.edges[1] - each.edges[0])
                    axes.stairs(density, each.edges, fill=True, alpha=0.45, color=COLOURS[index], label=text)
            axes.set(title=f"{path} ({_PATH_NAMES[path]})", xlabel="activation")
            axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.18))
        panels[0].set_ylabel("density")

    rows = [
        {"run": name, "block": block, "path": each.path, "bin_from": a, "bin_to": b, "count": count}
        for name, parts in own
        for each in parts
        for a, b, count in zip(each.edges[:-1], each.edges[1:], each.counts, strict=True)
    ]
    values = {name: [each.to_dict() for each in parts] for name, parts in own}
    return Chart(
        name=f"activations-{block.replace('.', '-').replace(' ', '-')}",
        title=f"Activations of {block} ({kind})",
        draw=draw,
        rows=rows,
        values={"block": block, "kind": kind, "distributions": values},
        size=(3.2 * len(paths), 3.6),
    )


def _norms(runs: Sequence[AnalysedRun]) -> tuple[list[Chart], Any]:
    found = {run.name: activation_norms(run.model, run.inputs) for run in runs}
    lines = [
        Line(label=name, points=tuple((float(i + 1), norm) for i, norm in enumerate(norms.values())))
        for name, norms in found.items()
    ]
    chart = curve_chart(
        "activation-norms",
        "L2 norm of an image's activation after each layer, mean over images",
        lines,
        axes_titles=("layer, in the order of the network", "mean L2 norm"),
        values={"norms": found},
    )
    return [chart], found


def _gradients(runs: Sequence[AnalysedRun]) -> tuple[list[Chart], Any]:
    found = {
        run.name: gradient_statistics(run.model, run.loss, run.inputs, run.targets, mechanism=run.mechanism)
        for run in runs
    }
    values = {name: each.to_dict() for name, each in found.items()}
    return [_norm_histogram(found, values), _signal_chart(found, values)], values


def _norm_histogram(found: dict[str, GradientStatistics], values: dict[str, Any]) -> Chart:
    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        for index, (name, each) in enumerate(found.items()):
            share = "" if each.clipped is None else f", {each.clipped:.0%} clipped"
            axes.hist(each.norms, bins=40, alpha=0.5, color=COLOURS[index], label=f"{name}{share}")
            if each.clip_norm is not None:
                axes.axvline(each.clip_norm, color=COLOURS[index], linestyle="--")
        axes.set(xlabel="L2 norm of one image's gradient (dashed: clip norm)", ylabel="images")
        axes.legend(fontsize=8)

    rows = [{"run": name, "norm": norm} for name, each in found.items() for norm in each.norms]
    title = "Norms of single images' gradients"
    return Chart(name="gradient-norms", title=title, draw=draw, rows=rows, values={"statistics": values})


def _signal_chart(found: dict[str, GradientStatistics], values: dict[str, Any]) -> Chart:
    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        for index, (name, each) in enumerate(found.items()):
            heights = [layer.signal if layer.ratio is None else layer.ratio for layer in each.layers]
            axes.plot(range(1, len(heights) + 1), heights, "o-", markersize=3, color=COLOURS[index], label=name)
        axes.set(xlabel="parameter, in the order of the network", ylabel="signal / noise in one step")
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.legend(fontsize=8)

    rows = [{"run": name, **layer} for name, each in values.items() for layer in each["layers"]]
    title = "Signal-to-noise ratio of one step by layer"
    return Chart(name="signal-to-noise", title=title, draw=draw, rows=rows, values={"statistics": values})


def _hessian(runs: Sequence[AnalysedRun], effort: Effort, tell: Callable[[str], None]) -> tuple[list[Chart], Any]:
    values: dict[str, Any] = {}
    lines: list[Line] = []
    for run in runs:
        generator = torch.Generator().manual_seed(effort.seed)
        product = HessianProduct(run.model, run.loss, run.inputs, run.targets)
        largest = largest_eigenvalues(
            product, count=effort.eigenvalues, iterations=effort.iterations, generator=generator
        )
        tell(f"hessian of {run.name}: largest eigenvalue {largest.values[0]:.4g}")
        trace = hutchinson_trace(product, probes=effort.probes, generator=generator)
        spectrum = lanczos_density(product, steps=effort.lanczos, generator=generator)
        values[run.name] = {
            "loss": f"mean {run.released.config.loss or 'cross_entropy'} over {len(run.inputs)} images",
            "parameters": product.size,
            "products": product.products,
            "eigenvalues": largest.to_dict(),
            "trace": trace.to_dict(),
            "spectrum": spectrum.to_dict(),
        }
        width = max((spectrum.values[-1] - spectrum.values[0]) / 100, 1e-12)
        points = np.linspace(spectrum.values[0] - 5 * width, spectrum.values[-1] + 5 * width, 400)
        heights = spectrum.density(points, width=width)
        lines.append(Line(label=run.name, points=tuple(zip(points.tolist(), heights.tolist(), strict=True)), marker=""))
    density = curve_chart(
        "hessian-density",
        "Spectral density of the Hessian (Lanczos)",
        lines,
        axes_titles=("eigenvalue", "density"),
        values={"hessian": values},
    )
    drawn = density.draw

    def logarithmic(figure: Figure) -> None:
        drawn(figure)
        figure.axes[0].set_yscale("log")
        figure.axes[0].set_ylim(bottom=1e-8)

    return [Chart(**{**density.__dict__, "draw": logarithmic})], values


def _surface(runs: Sequence[AnalysedRun], effort: Effort) -> tuple[list[Chart], Any]:
    """One random direction scaled by filters, and a plane of two, the same for networks of the same shapes."""
    values: dict[str, Any] = {}
    lines: list[Line] = []
    planes: list[tuple[str, Any]] = []
    for run in runs:
        generator = torch.Generator().manual_seed(effort.seed)
        first, second = (random_direction(run.model, generator) for _ in range(2))
        data = run.inputs, run.targets
        line = loss_slice(run.model, run.loss, data, [first], name="random, scaled by filters", offsets=_OFFSETS)
        plane = loss_slice(
            run.model, run.loss, data, [first, second], name="plane of two random", offsets=_OFFSETS[::4]
        )
        values[run.name] = [line.to_dict(), plane.to_dict()]
        lines.append(Line(label=run.name, points=tuple(zip(line.offsets, line.losses, strict=True))))
        planes.append((run.name, plane))
    titles = ("multiple of a random direction, scaled by filters", "mean loss")
    chart = curve_chart(
        "loss-slice", "Loss along a random direction", lines, axes_titles=titles, values={"slices": values}
    )

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(planes), squeeze=False)[0]
        for panel, (name, plane) in zip(panels, planes, strict=True):
            size = len(plane.offsets)
            grid = np.array(plane.losses).reshape(size, size)
            image = panel.contourf(plane.offsets, plane.offsets, grid, levels=15)
            panel.set(title=name, xlabel="second direction", ylabel="first direction")
            figure.colorbar(image, ax=panel)

    rows = [
        {"run": name, "first": a, "second": b, "loss": plane.losses[i * len(plane.offsets) + j]}
        for name, plane in planes
        for i, a in enumerate(plane.offsets)
        for j, b in enumerate(plane.offsets)
    ]
    flat = Chart(
        name="loss-plane",
        title="Loss over a plane of two random directions",
        draw=draw,
        rows=rows,
        values={"slices": values},
        size=(4.2 * len(planes), 3.6),
    )
    return [chart, flat], values


def _watch(watched: Sequence[tuple[str, Path]]) -> tuple[list[Chart], Any]:
    missing = [name for name, path in watched if not path.exists()]
    if missing or not watched:
        raise ArgumentError(f"no {WATCH_FILE} in {', '.join(missing) or 'no run'}: train with --watch to record it.")
    values = [(name, read_watch(path)) for name, path in watched]
    return watch_charts(values), dict(values)
