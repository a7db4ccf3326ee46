"""Write a released model in a format that other programs run: ONNX, torch.export, safetensors, a MONAI bundle.

A release that does not verify is not exported. Each export is read back, run on synthetic images and compared with the
model; what differs is refused, and nothing is written before that.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpvision import __version__, models
from dpvision.config import required
from dpvision.errors import ArgumentError, DPVisionError, brief, did_you_mean, shown
from dpvision.exports.monai_bundle import MODEL_FILE, BundleNetwork, bundle_texts
from dpvision.exports.plain_graph import PlainGraph, outputs_of_run
from dpvision.inference.load import ReleasedModel, load_model
from dpvision.models.losses import outputs_for
from dpvision.own_code import code_errors, named_again
from dpvision.release.schema import Certificate
from dpvision.release.verify import examine
from dpvision.storage.files import disk_errors, sha256_hex, tensors_of, weights_bytes, write_atomically

Format = Literal["onnx", "torch-export", "safetensors", "monai-bundle"]
FORMATS: Final[tuple[Format, ...]] = ("onnx", "torch-export", "safetensors", "monai-bundle")
ENDINGS: Final[dict[Format, str]] = {
    "onnx": ".onnx",
    "torch-export": ".pt2",
    "safetensors": ".safetensors",
    "monai-bundle": "-bundle",
}
TOLERANCE: Final = 1e-4
"""Largest difference of probabilities, and of logits relative to the largest of them if that is above 1."""
INPUT, PROBABILITIES, LOGITS = "images", "probabilities", "logits"
_NEEDED: Final = ("onnx", "onnxscript", "onnxruntime")
INSTALL: Final = "pip install -c constraints.txt '.[export]'"
_LARGEST_PROTOBUF: Final = 2**31 - 1
_COMPARED: Final = (3, 1)
"""Images in each compared batch: another number than in tracing, and a single one."""

Answers = tuple[NDArray[Any], NDArray[Any]]
"""Probabilities and logits."""
Runner = Callable[[Tensor], Answers]


@final
@dataclass(frozen=True)
class Exported:
    """An export that was compared with the model and written.

    Attributes:
        path: the file, or the folder of a bundle.
        format: one of ``FORMATS``.
        largest_difference: of any probability from that of the model, over the images that were compared.
        facts: what the export says of itself: classes, preprocessing, epsilon, delta and the release's digest.
        stamps: why the model must not be released; empty if it may be.
    """

    path: Path
    format: Format
    largest_difference: float
    facts: Mapping[str, str]
    stamps: tuple[str, ...]


def export(
    run: Path | str,
    *,
    to: Format = "onnx",
    output: Path | str | None = None,
    model: object | None = None,
    force: bool = False,
) -> Exported:
    """Export a released model.

    Args:
        run: the run folder, or a copy of its release folder.
        to: ``onnx``; ``torch-export``, a .pt2 file for ``torch.export.load``; ``safetensors``, the weights and fixed
            features by name, for those who have the architecture; ``monai-bundle``, a folder, for segmentation.
        output: where to write; by default the run's name in the current folder. Not inside the run.
        model: the code of the run's own model, as for ``load_model``.
        force: replace an existing file. A folder is never replaced.

    Returns:
        Where the export is, and how far it is from the model.

    Raises:
        ArgumentError: ``to`` or ``output`` is not possible, a package is missing, or the model has an operation that
            the format can't express.
        TamperError: the release does not verify.
        PrivacyError: the named code is not what the model was trained with; nothing of it was executed.
        DPVisionError: the export does not give the model's outputs; nothing was written.

    Guarantee: an export holds the released weights, the pixel constants, class names, and the facts of the certificate
    that ``Exported.facts`` shows. It holds no count of training data, no key, no path and no source code. No code is
    executed that ``model`` does not name.
    """
    if to not in FORMATS:
        raise ArgumentError(f"to must be one of {', '.join(FORMATS)}, got {brief(to)!r}. {did_you_mean(to, FORMATS)}")
    missing = [name for name in _NEEDED if to == "onnx" and find_spec(name) is None]
    if missing:
        raise ArgumentError(f"an ONNX export needs {', '.join(missing)}, not installed here: {INSTALL}")
    place = _free_place(Path(run), to, None if output is None else Path(output), force=force)
    examined = examine(Path(run))
    certificate, _ = examined.require_ok()
    if examined.manifest is None:
        raise ArgumentError(f"{shown(run)} must be a run or a release folder: a certificate alone has no model.")
    released = load_model(run, model=model)
    if released.certificate != certificate.model_dump():
        raise DPVisionError(f"{shown(run)} was changed while it was read. Try again.")
    if to == "monai-bundle" and released.config.task != "segmentation":
        raise ArgumentError("a MONAI bundle is for segmentation, and this model predicts classes. Use --to onnx.")
    facts = public_facts(released, certificate, sha256_hex(examined.manifest))
    files, difference = converted(released, to=to, facts=facts, model=model)
    _place_files(place, files)
    return Exported(place, to, difference, facts, tuple(certificate.stamps))


def converted(
    released: ReleasedModel, *, to: Format, facts: Mapping[str, str], model: object | None = None
) -> tuple[dict[str, bytes], float]:
    """Convert a model and compare the result with it; nothing is written.

    Args:
        released: the model.
        to: one of ``FORMATS``.
        facts: what the export says of itself.
        model: the code of an own model.

    Returns:
        The files by path (one without a name, or those of a bundle), and the largest difference of a probability.

    Raises:
        ArgumentError: the model has an operation that the format can't express.
        DPVisionError: the result does not give the model's outputs.
    """
    files, runner = _written(released, to, facts, model)
    return files, _compared(released, runner, to)


def public_facts(released: ReleasedModel, certificate: Certificate, release_sha256: str) -> dict[str, str]:
    """Return what an export says of itself, as texts; lists are JSON.

    Args:
        released: the model.
        certificate: of its release, verified.
        release_sha256: digest of the release's manifest.
    """
    channels, height, width = released.image_shape
    data = released.config.data
    own = released.normalisation.for_channels(channels)
    facts = {
        "format": "dpvision export 1",
        "task": "findings" if data.findings is not None else released.config.task,
        "model": required(released.config.model, "model").name,
        "classes": json.dumps(list(released.class_names)),
        "image_shape": json.dumps([channels, height, width]),
        "preprocessing": (
            f"{'grey' if channels == 1 else 'RGB'} bytes 0..255, channels first; scale to cover {width} x {height} "
            "pixels (bilinear, antialiased) and crop the middle, as Pillow's ImageOps.fit does. Normalisation is part "
            "of the graph."
        ),
        "normalisation": json.dumps({"mean": own.mean, "std": own.std, "of": "bytes / 255"}),
        "probabilities": outputs_of_run(released.config, len(released.class_names)),
        "epsilon": _number(certificate.epsilon),
        "delta": _number(certificate.delta),
        "adjacency": certificate.adjacency,
        "privacy_unit": certificate.privacy_unit,
        "release_sha256": release_sha256,
        "weights_sha256": certificate.weights_sha256,
        "dpvision": __version__,
    }
    if data.window is not None:
        facts["window"] = json.dumps(data.window)
    if not certificate.for_release:
        facts["not_for_release"] = json.dumps(certificate.stamps or ["no guarantee"])
    return facts


def _number(value: float | None) -> str:
    return "none" if value is None else repr(value)


# Where the export goes


def _free_place(run: Path, to: Format, output: Path | None, *, force: bool) -> Path:
    """Return where to write; refuse a place that is taken, or that lies in the run."""
    whole = run.resolve()
    name = whole.parent.name if whole.name == "release" else whole.name
    place = output if output is not None else Path(f"{name}{ENDINGS[to]}")
    around = whole.parent if whole.name == "release" else whole
    if place.resolve().is_relative_to(around):
        raise ArgumentError(f"--output must lie outside the run's own folder, got {shown(place)}.")
    if to == "monai-bundle" or place.is_dir():
        if place.exists() or place.is_symlink():
            raise ArgumentError(f"{shown(place)} exists already. Choose another --output.")
    elif (place.exists() or place.is_symlink()) and not force:
        raise ArgumentError(f"{shown(place)} exists already. Choose another --output, or replace it with --force.")
    return place


def _place_files(place: Path, files: Mapping[str, bytes]) -> None:
    """Write one file, or a folder that appears as a whole."""
    with disk_errors(f"write {shown(place)}"):
        if set(files) == {""}:
            write_atomically(place, files[""])
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.", suffix=".tmp"))
        try:
            for name, content in files.items():
                write_atomically(beside / name, content)
            beside.chmod(0o755)
            os.rename(beside, place)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise


# The formats


def _written(
    released: ReleasedModel, to: Format, facts: Mapping[str, str], code: object | None
) -> tuple[dict[str, bytes], Runner]:
    """Return the files of an export, and a function that runs what they hold."""
    if to == "safetensors":
        # One entry, since safetensors writes several in any order.
        content = weights_bytes(_all_tensors(released.model), metadata={"dpvision": json.dumps(dict(facts))})
        return {"": content}, _reloaded(released, content, code)
    if to == "onnx":
        content = _onnx_bytes(_traced(PlainGraph(released), released.image_shape, torch.uint8), facts)
        return {"": content}, _in_onnxruntime(content)
    if to == "torch-export":
        content = _program_bytes(_traced(PlainGraph(released), released.image_shape, torch.uint8), facts)
        return {"": content}, _in_torch(content)
    network = BundleNetwork(PlainGraph(released))
    content = _program_bytes(_traced(network, released.image_shape, torch.float32), facts)
    texts = bundle_texts(class_names=released.class_names, image_shape=released.image_shape, facts=facts)
    files = {MODEL_FILE: content, **{name: text.encode() for name, text in texts.items()}}
    return files, _in_bundle(content)


def _traced(graph: nn.Module, image_shape: tuple[int, int, int], dtype: torch.dtype) -> torch.export.ExportedProgram:
    """Trace a graph for any number of images; file names and source lines are left out of it."""
    example = torch.zeros(2, *image_shape, dtype=dtype)
    with code_errors("the model can't be written as a graph"), _quiet(), torch.no_grad():
        batch = {0: torch.export.Dim("batch")}
        program = torch.export.export(graph.eval(), (example,), dynamic_shapes=(batch,))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def _program_bytes(program: torch.export.ExportedProgram, facts: Mapping[str, str]) -> bytes:
    content = io.BytesIO()
    with _quiet():
        torch.export.save(program, content, extra_files={"dpvision.json": json.dumps(dict(facts), indent=2)})
    return content.getvalue()


def _onnx_bytes(program: torch.export.ExportedProgram, facts: Mapping[str, str]) -> bytes:
    """Convert a traced graph; what the exporter notes about source code is removed."""
    with code_errors("the model can't be written as ONNX"), _quiet():
        converted = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=[INPUT], output_names=[PROBABILITIES, LOGITS]
        )
        proto: Any = converted.model_proto if converted is not None else None
        graphs = [proto.graph, *proto.functions]
        for part in [*graphs, *(node for graph in graphs for node in graph.node), *proto.graph.value_info]:
            del part.metadata_props[:]
            part.doc_string = ""
        proto.graph.name, proto.producer_name, proto.producer_version = "dpvision", "dpvision", __version__
        del proto.metadata_props[:]
        for key, value in facts.items():
            proto.metadata_props.add(key=key, value=value)
        if proto.ByteSize() > _LARGEST_PROTOBUF:
            raise ArgumentError("the model is larger than 2 GB, more than an ONNX file holds. Use --to torch-export.")
        return proto.SerializeToString(deterministic=True)


def _all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, also the fixed features that a state dict leaves out."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes about packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# The comparison


def _in_onnxruntime(content: bytes) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Answers:
        probabilities, logits = session.run([PROBABILITIES, LOGITS], {INPUT: images.numpy()})
        return np.asarray(probabilities), np.asarray(logits)

    return run


def _in_torch(content: bytes) -> Runner:
    with _quiet():
        module = torch.export.load(io.BytesIO(content)).module()

    def run(images: Tensor) -> Answers:
        probabilities, logits = module(images)
        return probabilities.numpy(), logits.numpy()

    return run


def _in_bundle(content: bytes) -> Runner:
    """Run the network as a bundle's configuration does; it gives probabilities alone."""
    with _quiet():
        module = torch.export.unflatten(torch.export.load(io.BytesIO(content)))

    def run(images: Tensor) -> Answers:
        probabilities = module(images.float()).numpy()
        return probabilities, probabilities

    return run


def _reloaded(released: ReleasedModel, content: bytes, code: object | None) -> Runner:
    """Run a new model whose every tensor comes from the file."""
    chosen = required(released.config.model, "model")
    outputs = outputs_for(released.config.task, len(released.class_names))
    own = named_again(chosen.name, chosen.sha256, code, kind="model")
    shape = released.image_shape
    if own is None:
        network = models.create(chosen.name, num_classes=outputs, in_channels=shape[0], seed=0, **chosen.options)
    else:
        network = models.create_own(own, num_classes=outputs, image_shape=shape, seed=0)
    stored = tensors_of(content, name="the export")
    with torch.no_grad():
        for name, tensor in _all_tensors(network).items():
            tensor.copy_(stored[name])
    network.eval()
    return lambda images: _answers(released, network, images)


def _answers(released: ReleasedModel, network: nn.Module, images: Tensor) -> Answers:
    """Probabilities and logits as ``dpvision predict`` computes them."""
    with torch.no_grad():
        logits = network(released.normalisation.apply(images)).double()
    kind = outputs_of_run(released.config, len(released.class_names))
    positive = logits.softmax(1) if kind == "softmax" else logits.sigmoid()
    probabilities = torch.cat([1 - positive, positive], 1) if kind == "one map" else positive
    return probabilities.numpy(), logits.numpy()


def _compared(released: ReleasedModel, run: Runner, to: Format) -> float:
    """Return the largest difference of a probability; refuse an export that differs by more than ``TOLERANCE``."""
    generator = np.random.default_rng(0)
    largest = 0.0
    for count in _COMPARED:
        pixels = generator.integers(0, 256, size=(count, *released.image_shape), dtype=np.uint8)
        pixels[1:2] //= 8  # a dark image, too
        images = torch.from_numpy(pixels)
        probabilities, logits = _answers(released, released.model, images)
        with torch.no_grad(), code_errors(f"the {to} export can't be run"):
            found, found_logits = run(images)
        allowed = TOLERANCE * max(1.0, float(np.abs(logits).max()))
        off = _distance(found, probabilities)
        off_logits = 0.0 if found_logits is found else _distance(found_logits, logits)
        if not (off <= TOLERANCE and off_logits <= allowed):
            raise DPVisionError(
                f"the {to} export does not give the model's outputs: probabilities differ by {off:.2g}, logits by "
                f"{off_logits:.2g}, at most {TOLERANCE:g} is allowed. Nothing was written."
            )
        largest = max(largest, off)
    return largest


def _distance(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest absolute difference; infinite where the shapes differ, NaN where a value is not a number."""
    return float(np.abs(found - expected).max()) if found.shape == expected.shape else np.inf
