"""The model card of a release: README.md with YAML front matter, as model hubs read it. Made from public files only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dpvision.errors import printable
from dpvision.own_code import is_own
from dpvision.privacy.mechanism import rounded_up
from dpvision.release.certificate_page import safe_markdown, search_sentence
from dpvision.release.schema import Certificate, parse_certificate
from dpvision.release.statements import OWN_MODEL, WORDING, own_code_declarations

_METRICS = {
    "accuracy": "Accuracy",
    "mean_auc": "AUC, mean over findings",
    "mean_average_precision": "Average precision, mean over findings",
    "top5": "Top-5 accuracy",
    "dice": "Dice, mean over {image}s",
    "dice_per_patient": "Dice, mean over patients",
    "iou": "IoU, mean over {image}s",
    "pixel_accuracy": "Pixel accuracy",
    "baseline_dice": "Dice of the best constant mask",
    "loss": "Loss",
}
_HUB_METRICS = ("accuracy", "dice", "iou")
_HUB_TASKS = {"classification": "image-classification", "segmentation": "image-segmentation"}


def known_model_cards(
    certificate: Mapping[str, Any], *, metrics: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the card, and its earlier versions, which used an export on 8-bit images alone, or did not say how."""
    card, claims = model_card(certificate, metrics=metrics, config=config), parse_certificate(certificate)
    (section, short) = ("".join(_without_dpvision(claims, config, short=short)) for short in (False, True))
    return (card, card.replace(section, short), card.replace(f"{section}\n\n", "")) if section else (card,)


def model_card(certificate: Mapping[str, Any], *, metrics: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the model card of a release.

    The owner of the model chooses its licence: the card says "unknown" until the owner writes one in.

    Args:
        certificate: The content of certificate.json.
        metrics: The content of metrics.json.
        config: The content of config.json.

    Returns:
        Markdown with front matter. Names from elsewhere cannot become markup or keys.
    """
    claims = parse_certificate(certificate)
    final = metrics.get("final")
    final = final if isinstance(final, dict) else {}
    measured = {name: value for name, value in final.items() if name in _METRICS and isinstance(value, float)}
    front = "\n".join(_front_matter(claims, measured, config))
    where = str(final.get("evaluated_on", "a public test set"))
    body = "\n\n".join(_sections(claims, _metrics_text(claims, measured, where), config))
    return f"---\n{front}\n---\n\n{body}\n"


def _front_matter(certificate: Certificate, measured: Mapping[str, float], config: Mapping[str, Any]) -> Iterator[str]:
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
    shown = [name for name in _HUB_METRICS if name in measured]
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
        yield f"      value: {measured[name]!r}"
    if certificate.epsilon is not None and certificate.delta is not None:
        yield "    - type: epsilon"
        yield f"      value: {certificate.epsilon!r}"
        yield f"      name: {_text(f'epsilon at delta {rounded_up(certificate.delta)}')}"


def _sections(certificate: Certificate, metrics: str, config: Mapping[str, Any]) -> Iterator[str]:
    """The paragraphs of the card, in their order."""
    words = WORDING[certificate.format]
    yield f"# {safe_markdown(_name(config))}"
    if certificate.stamps:
        yield "**Not for release:** " + "; ".join(safe_markdown(stamp) for stamp in certificate.stamps) + "."
    yield _what(certificate, config)
    yield "## Intended use\n" + _use(certificate, config)
    yield from _own_code(config)
    yield from _without_dpvision(certificate, config)
    yield ("## Figures\n" if certificate.format == 2 else "## Metrics\n") + metrics
    yield "## Privacy\n" + _privacy(certificate)
    yield "## Limits\n" + _limits(certificate)
    yield "## Training data, and what was declared\n" + "\n".join(
        f"- {safe_markdown(item.what)}: {safe_markdown(item.how)}" for item in certificate.declared
    )
    yield (
        "## Check it\n```\ndpvision verify .\n```\n"
        f"It recomputes every {words.values} of certificate.json from ledger.jsonl."
    )


def _what(certificate: Certificate, config: Mapping[str, Any]) -> str:
    """Model, task, data, shape and classes in one sentence."""
    model = config.get("model")
    name = str(model.get("name")) if isinstance(model, dict) else "an image model"
    data = certificate.data
    shape = "×".join(str(side) for side in data.get("image_shape", ()))
    classes = ", ".join(safe_markdown(str(label)) for label in data.get("class_names", ()))
    images = f"{WORDING[certificate.format].image}s{f' of shape {shape}' if shape else ''}"
    source = safe_markdown(str(data.get("source", "unknown")))
    ending = f"; classes: {classes}." if classes else "."
    return f"{safe_markdown(name)} for {_task(config)}, trained on {source}: {images}{ending}"


def _use(certificate: Certificate, config: Mapping[str, Any]) -> str:
    """What the model is for, and what it is not for."""
    image = WORDING[certificate.format].image
    what = f"a class for each {image}" if _task(config) == "image-classification" else "a class for each pixel"
    text = (
        f"It gives {what}, for {image}s like those that it was trained on. It was not tested on others. It is no "
        "medical device, and no decision about a person should rest on it alone. Its owner says who may use it, and "
        "under which licence."
    )
    return text if certificate.for_release else f"{text} It must not be given away: see above."


def _own_code(config: Mapping[str, Any]) -> Iterator[str]:
    """How to use a model of the user's own, whose code is not part of the release."""
    model = config.get("model")
    name = str(model.get("name")) if isinstance(model, dict) else ""
    if not is_own(name):
        return
    declared = dict(own_code_declarations(config))[OWN_MODEL]
    place = declared.partition(";")[0]
    yield (
        f"## Code\nThe model is the owner's own code, which is not part of this release: {safe_markdown(place)}. Ask "
        f"the owner for it, read it, and name it:\n```\ndpvision predict . IMAGES --model {_plain(name)}\n```\n"
        "It is executed only if its hash is the same."
    )


def _without_dpvision(certificate: Certificate, config: Mapping[str, Any], *, short: bool = False) -> Iterator[str]:
    """How to use an export with onnxruntime, numpy and Pillow alone; of a model that dpvision can export.

    The lines prepare an image as ``dpvision.data.decode`` does; ``short`` gives those of an earlier version.
    """
    shape = certificate.data.get("image_shape")
    if config.get("task") not in _HUB_TASKS or not isinstance(shape, list) or len(shape) != 3:
        return
    if shape[0] not in (1, 3) or not all(type(side) is int and side > 0 for side in shape):
        return
    channels, height, width = shape
    mode, size = ("L" if channels == 1 else "RGB"), f"({width}, {height})"
    own = str(config["model"].get("name", "")) if isinstance(config.get("model"), dict) else ""
    code = f" --model {_plain(own)}" if is_own(own) else ""
    answer = "[0].argmax(0)" if config["task"] == "segmentation" else ""
    yield (
        "## Use it without dpvision\nOnce, with dpvision and this folder as RELEASE:\n```\n"
        f"dpvision export RELEASE --to onnx --output model.onnx{code}\n```\n"
        "Then anywhere, with onnxruntime, numpy and Pillow; normalisation is part of model.onnx:\n```python\n"
        "import numpy as np, onnxruntime\n"
        "from PIL import Image, ImageOps\n"
        'session = onnxruntime.InferenceSession("model.onnx")\n'
        f"{_opened_short(mode, size) if short else _opened(mode, size, _window(config))}"
        f"pixels = np.asarray(image).reshape(1, {height}, {width}, {channels}).transpose(0, 3, 1, 2)\n"
        'print(session.get_modelmeta().custom_metadata_map["classes"], '
        f'session.run(["probabilities"], {{"images": pixels}})[0]{answer})\n```'
    )


def _opened_short(mode: str, size: str) -> str:
    return f'image = ImageOps.fit(Image.open("image.png").convert("{mode}"), {size}, Image.Resampling.BILINEAR)\n'


def _opened(mode: str, size: str, window: tuple[float, float] | None) -> str:
    """Lines of Python that open an image upright, in 8 bits, over black, and at the size of the model."""
    values = "np.asarray(image) / 65535"
    if window is not None:
        low, high = window
        values = f"(np.clip(np.asarray(image, float), {low}, {high}) - {low}) / {high - low}"
    black = 'Image.new("RGBA", image.size, "black")'
    grey = '.convert("L")' if mode == "L" else ""
    return (
        'image = ImageOps.exif_transpose(Image.open("image.png"))\n'
        'if image.mode.startswith("I"): '
        f"image = Image.fromarray(np.rint({values} * 255).astype(np.uint8))  # 16 bits\n"
        f'opaque = Image.alpha_composite({black}, image.convert("RGBA"))\n'
        f'image = ImageOps.fit(opaque.convert("RGB"){grey}, {size}, Image.Resampling.BILINEAR)\n'
    )


def _window(config: Mapping[str, Any]) -> tuple[float, float] | None:
    """The window of intensities of image files; that of an .npz file is for its own numbers."""
    data = config.get("data")
    data = data if isinstance(data, dict) else {}
    window = data.get("window")
    if not isinstance(window, list) or len(window) != 2 or str(data.get("source", "")).endswith(".npz"):
        return None
    numbers = [float(each) for each in window if type(each) in (int, float) and abs(each) < 1e30]
    return (numbers[0], numbers[1]) if len(numbers) == 2 and numbers[0] < numbers[1] else None


def _plain(name: str) -> str:
    """A name inside a block of code, which it cannot leave."""
    return printable(name).replace("`", "'")


def _metrics_text(certificate: Certificate, measured: Mapping[str, float], where: str) -> str:
    """A table of the metrics; ``where`` names the test set."""
    if not measured:
        return "None were measured."
    image = WORDING[certificate.format].image
    rows = "\n".join(f"| {_METRICS[name].format(image=image)} | {value:.4g} |" for name, value in measured.items())
    head = "figure" if certificate.format == 2 else "metric"
    return f"On {safe_markdown(where)}.\n\n| {head} | value |\n|---|---|\n{rows}"


def _privacy(certificate: Certificate) -> str:
    """The guarantee, and that of other units."""
    if certificate.epsilon is None or certificate.delta is None:
        return "None: parts of the training data may be read off this model."
    unit = safe_markdown(certificate.privacy_unit)
    other = "look at" if certificate.format == 2 else "query to"
    lines = [
        f"Epsilon {rounded_up(certificate.epsilon)} at delta {rounded_up(certificate.delta)} "
        f"({certificate.adjacency.replace('_', ' ')} of one {unit}), over {certificate.steps_taken} steps and every "
        f"other charged {other} the data. Whole curve, bounds on attacks and mechanism: certificate.md."
    ]
    if certificate.search is not None:
        lines.append(search_sentence(certificate.search))
    for another in certificate.other_units:
        epsilon = "nothing is proved" if another.epsilon is None else f"epsilon {rounded_up(another.epsilon)}"
        lines.append(f"For {safe_markdown(another.unit)}: {epsilon}.")
    return "\n\n".join(lines)


def _limits(certificate: Certificate) -> str:
    """What neither the model nor its guarantee promises."""
    metrics = "figures" if certificate.format == 2 else "metrics"
    own = [
        f"Noise costs rare classes and unusual {WORDING[certificate.format].image}s most: look at the {metrics} of "
        "each class in metrics.json.",
        "Differential privacy hides who took part. It does not hide what is true of people in general.",
    ]
    return "\n".join(f"- {safe_markdown(text)}" for text in [*own, *certificate.not_covered])


def _task(config: Mapping[str, Any]) -> str:
    return _HUB_TASKS.get(str(config.get("task")), _HUB_TASKS["classification"])


def _name(config: Mapping[str, Any]) -> str:
    name = config.get("name")
    return name if isinstance(name, str) and name else "model"


def _text(text: str) -> str:
    return json.dumps(text)
