"""Watch a run while it trains: activation norms on public images, and the optimizer's first moment.

``Watch`` is a callback of ``train``. It is shown copies of the weights at each evaluation; those of a private run are
functions of charged releases, so that looking at them costs nothing. The images must be public.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from dpvision.analyze.activations import activation_norms, first_activation
from dpvision.analyze.analysed_run import NO_PRIVACY_STAMP
from dpvision.analyze.figures import Chart, Line, curve_chart
from dpvision.errors import ArgumentError
from dpvision.storage.files import disk_errors, parse_object, read_file, write_atomically
from dpvision.training.callbacks import RunCallback, Snapshot
from dpvision.training.defaults import Choice

WATCH_FILE: Final = "watch.json"
FIRST_MOMENT: Final = "exp_avg"
_IMAGES: Final = 256


@final
class Watch(RunCallback):
    """Record activation norms and the mean absolute first moment of Adam or NAdam at each evaluation.

    Args:
        path: JSON file to write, such as RUN/logs/watch.json. A resumed run continues it.
        images: public images (uint8, N × C × H × W) to run the model on; None takes the test part of the published
            dataset that the run trains on.

    Raises:
        ArgumentError: ``path`` holds something else.

    Guarantee: of images, only those given here and published test images are used. A run whose test images came with
    private ones, and that is given no others, records the first moment alone.
    """

    def __init__(self, path: Path | str, *, images: Tensor | None = None) -> None:
        self._path, self._images = Path(path), images
        self._points: list[dict[str, Any]] = read_watch(self._path)["points"] if self._path.exists() else []

    @property
    def wants_weights(self) -> bool:
        """Always: that is what is watched."""
        return True

    def started(self, *, name: str, steps: int, done: int, choices: tuple[Choice, ...]) -> None:
        """Keep the points of the steps that are done: the others will be taken again."""
        del name, steps, choices
        self._points = [point for point in self._points if point["step"] <= done]

    def weights(self, snapshot: Snapshot) -> None:
        """Measure one copy of the weights; the file is replaced as a whole."""
        point: dict[str, Any] = {"step": snapshot.step, "epsilon": snapshot.epsilon}
        images = self._images if self._images is not None else snapshot.public_images
        if images is not None and len(images):
            norms = activation_norms(snapshot.model, snapshot.normalised(images[:_IMAGES]))
            point |= {"norms": norms, "first_activation": first_activation(snapshot.model, norms)}
        moments = [
            value.double().abs() for key, value in snapshot.moments.items() if key.startswith(f"{FIRST_MOMENT}/")
        ]
        if moments:
            point["mean_absolute_first_moment"] = float(torch.cat([each.flatten() for each in moments]).mean())
        self._points = [each for each in self._points if each["step"] != snapshot.step] + [point]
        stamps = [] if snapshot.private else [NO_PRIVACY_STAMP]
        content = json.dumps({"stamps": stamps, "points": self._points}, indent=2, allow_nan=False) + "\n"
        with disk_errors(f"write {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, content.encode())


def read_watch(path: Path) -> dict[str, Any]:
    """Read what ``Watch`` wrote.

    Args:
        path: the file.

    Returns:
        Its stamps and points.

    Raises:
        ArgumentError: the file is something else.
    """
    values = parse_object(read_file(path), name=str(path))
    points = values.get("points")
    if not isinstance(points, list) or not all(isinstance(each, dict) and "step" in each for each in points):
        raise ArgumentError(f"{path} is not what dpvision train --watch writes.")
    return {"stamps": list(values.get("stamps", ())), "points": points}


def watch_charts(watched: Sequence[tuple[str, dict[str, Any]]]) -> list[Chart]:
    """Overlay what was watched in several runs.

    Args:
        watched: name of each run and what ``read_watch`` returned for it.

    Returns:
        Activation norms and first moments over steps; only those that some run has.
    """
    norms, moments = [], []
    for name, values in watched:
        points = values["points"]
        layers = [point.get("first_activation") for point in points]
        found = tuple(
            (float(p["step"]), float(p["norms"][layer])) for p, layer in zip(points, layers, strict=True) if layer
        )
        norms.append(Line(label=f"{name}: {next(filter(None, layers), '')}", points=found))
        key = "mean_absolute_first_moment"
        moments.append(Line(label=name, points=tuple((float(p["step"]), p[key]) for p in points if key in p)))
    values = {"runs": dict(watched)}
    titles = (
        ("activation-norms-over-training", "L2 norm of the first convolution's activations", norms, "mean L2 norm"),
        ("first-moment-over-training", "Mean absolute first moment of the optimizer", moments, "mean absolute value"),
    )
    return [
        curve_chart(file, title, lines, axes_titles=("step", y), values=values)
        for file, title, lines, y in titles
        if any(line.points for line in lines)
    ]
