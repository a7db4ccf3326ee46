"""The model card of a release: Markdown with front matter, as model hubs read it. Made from public files alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dpvision.privacy.mechanism import rounded_up
from dpvision.release.schema import Certificate, parse_certificate

_FIGURES = {
    "accuracy": "Accuracy",
    "top5": "Top-5 accuracy",
    "dice": "Dice, mean over pictures",
    "dice_per_patient": "Dice, mean over patients",
    "iou": "IoU, mean over pictures",
    "pixel_accuracy": "Pixel accuracy",
    "baseline_dice": "Dice of the best constant mask",
    "loss": "Loss",
}
_METRICS = ("accuracy", "dice", "iou")
_HUB_TASKS = {"classification": "image-classification", "segmentation": "image-segmentation"}
_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]<>|#"})


def model_card(certificate: Mapping[str, Any], *, metrics: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The card, from what certificate.json, metrics.json and config.json hold.

    The licence of the model is its owner's to choose: the card says that it is unknown until somebody writes one in.
    """
    claims = parse_certificate(certificate)
    final = metrics.get("final")
    figures = {
        name: value
        for name, value in (final if isinstance(final, dict) else {}).items()
        if name in _FIGURES and isinstance(value, float)
    }
    front = "\n".join(_front_matter(claims, figures, config))
    body = "\n\n".join(_sections(claims, figures, final if isinstance(final, dict) else {}, config))
    return f"---\n{front}\n---\n\n{body}\n"


def _front_matter(certificate: Certificate, figures: Mapping[str, float], config: Mapping[str, Any]) -> Iterator[str]:
    """YAML, with every text as a JSON string: YAML reads those, and nothing in them can become a key."""
    task = _task(config)
    data = str(certificate.data.get("source", "unknown"))
    yield "license: unknown"
    yield "library_name: dpvision"
    yield f"pipeline_tag: {task}"
    yield "tags:"
    tags = [task, "differential-privacy", *([] if certificate.for_release else ["not-for-release"])]
    yield from (f"- {tag}" for tag in tags)
    yield "datasets:"
    yield f"- {_text(data)}"
    shown = [name for name in _METRICS if name in figures]
    if not shown:
        return
    yield "metrics:"
    yield from (f"- {name}" for name in shown)
    yield "model-index:"
    yield f"- name: {_text(_name(config))}"
    yield "  results:"
    yield "  - task:"
    yield f"      type: {task}"
    yield "    dataset:"
    yield f"      name: {_text(data)}"
    yield f"      type: {_text(data)}"
    yield "    metrics:"
    for name in shown:
        yield f"    - type: {name}"
        yield f"      value: {figures[name]!r}"
    if certificate.epsilon is not None and certificate.delta is not None:
        yield "    - type: epsilon"
        yield f"      value: {certificate.epsilon!r}"
        yield f"      name: {_text(f'epsilon at delta {rounded_up(certificate.delta)}')}"


def _sections(
    certificate: Certificate, figures: Mapping[str, float], final: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[str]:
    yield f"# {_safe(_name(config))}"
    if certificate.stamps:
        yield "**Not for release:** " + "; ".join(_safe(stamp) for stamp in certificate.stamps) + "."
    yield _what(certificate, config)
    yield "## Intended use\n" + _use(certificate, config)
    yield "## Figures\n" + _figures(figures, final)
    yield "## Privacy\n" + _privacy(certificate)
    yield "## Limits\n" + _limits(certificate)
    yield "## Training data, and what was declared\n" + "\n".join(
        f"- {_safe(item.what)}: {_safe(item.how)}" for item in certificate.declared
    )
    yield "## Check it\n```\ndpvision verify .\n```\nIt recomputes every figure of certificate.json from ledger.jsonl."


def _what(certificate: Certificate, config: Mapping[str, Any]) -> str:
    model = config.get("model")
    name = str(model.get("name")) if isinstance(model, dict) else "an image model"
    data = certificate.data
    shape = "×".join(str(side) for side in data.get("image_shape", ()))
    classes = ", ".join(_safe(str(label)) for label in data.get("class_names", ()))
    pictures = f"pictures of shape {shape}" if shape else "pictures"
    return f"{_safe(name)} for {_task(config)}, trained on {_safe(str(data.get('source', 'unknown')))}: {pictures}" + (
        f"; classes: {classes}." if classes else "."
    )


def _use(certificate: Certificate, config: Mapping[str, Any]) -> str:
    what = "a class for each picture" if _task(config) == "image-classification" else "a class for each pixel"
    return (
        f"It gives {what}, for pictures like those that it was trained on. It was not tested on others. It is no "
        "medical device, and no decision about a person should rest on it alone. Its owner says who may use it, and "
        "under which licence." + ("" if certificate.for_release else " It must not be given away: see above.")
    )


def _figures(figures: Mapping[str, float], final: Mapping[str, Any]) -> str:
    if not figures:
        return "None were measured."
    rows = "\n".join(f"| {_FIGURES[name]} | {value:.4g} |" for name, value in figures.items())
    where = _safe(str(final.get("evaluated_on", "a public test set")))
    return f"On {where}.\n\n| figure | value |\n|---|---|\n{rows}"


def _privacy(certificate: Certificate) -> str:
    if certificate.epsilon is None or certificate.delta is None:
        return "None: parts of the training data may be read off this model."
    unit = _safe(certificate.privacy_unit)
    lines = [
        f"Epsilon {rounded_up(certificate.epsilon)} at delta {rounded_up(certificate.delta)} "
        f"({certificate.adjacency.replace('_', ' ')} of one {unit}), over {certificate.steps_taken} steps and every "
        "other charged look at the data. Whole curve, bounds on attacks and mechanism: certificate.md."
    ]
    for other in certificate.other_units:
        figure = "nothing is proved" if other.epsilon is None else f"epsilon {rounded_up(other.epsilon)}"
        lines.append(f"For {_safe(other.unit)}: {figure}.")
    return "\n\n".join(lines)


def _limits(certificate: Certificate) -> str:
    own = [
        "Noise costs rare classes and unusual pictures most: look at the figures of each class in metrics.json.",
        "Differential privacy hides who took part. It does not hide what is true of people in general.",
    ]
    return "\n".join(f"- {_safe(text)}" for text in [*own, *certificate.not_covered])


def _task(config: Mapping[str, Any]) -> str:
    return _HUB_TASKS.get(str(config.get("task")), _HUB_TASKS["classification"])


def _name(config: Mapping[str, Any]) -> str:
    name = config.get("name")
    return name if isinstance(name, str) and name else "model"


def _text(text: str) -> str:
    return json.dumps(text)


def _safe(text: str) -> str:
    """Text from elsewhere as text: no markup, one line."""
    return "".join(c if c.isprintable() else " " for c in text).translate(_SPECIAL)
