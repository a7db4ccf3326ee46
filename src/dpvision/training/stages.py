"""Training stages: which parameters each step trains, and the network that the engine runs for them.

Most runs have one stage. ``trained=head_then_all`` has two: the head alone, then the whole model. Where a stage leaves
the first layers frozen, their outputs (features) are computed once and kept, and the stage trains the rest on them.

Everything here is decided on synthetic images, so that no private image decides how a gradient is computed.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor, nn

from dpvision import kernels, models
from dpvision.config import RunConfig, ViewsConfig, required
from dpvision.data import Features, ImageStore, Normalisation, cache_folder, extract, kept_features
from dpvision.data.splits import RunSplits
from dpvision.errors import ArgumentError, translated_errors
from dpvision.gradients.ordinary import fast_plan, fused_forward
from dpvision.gradients.plan import check_model, plan_for, require_private_ready
from dpvision.gradients.separability import Finding
from dpvision.models import split
from dpvision.models.losses import RowLoss, classification_loss, loss_for, outputs_for
from dpvision.own_code import NO_CODE, RunCode, code_errors, is_own
from dpvision.privacy.values import Microbatch
from dpvision.ranks import ALONE, Ranks
from dpvision.training.callbacks import RunCallback
from dpvision.training.run_fingerprint import code_digest

Trained = Literal["head", "last", "all"]
SYNTHETIC_ROWS = 4
FROZEN, MOST_FROZEN = "frozen", 3
FEATURE_BYTES = 4 * 2**30
"""Most memory for kept features. A public limit, so that no row count decides how features are computed."""


# ---- Stages


@final
@dataclass(frozen=True, eq=False)
class Stage:
    """Consecutive steps that train the same parameters.

    Attributes:
        first_step: the first of them, counted from zero.
        trained: names of the parameters that require gradients.
        network: what is trained, on images or on the features of ``backbone``. Its parameters are the model's own,
            under the model's names.
        backbone: the frozen first layers, if their features are kept.
        dtype: the type in which features are kept.
        mirrored: whether the features of each image's mirror image are kept too.
    """

    first_step: int
    trained: frozenset[str]
    network: nn.Module
    backbone: nn.Module | None = None
    dtype: torch.dtype = torch.float32
    mirrored: bool = False


def single_stage(model: nn.Module) -> Stage:
    """One stage that trains every parameter that requires gradients, on images."""
    return Stage(0, frozenset(name for name, value in model.named_parameters() if value.requires_grad), model)


def training_stages(model: nn.Module, config: RunConfig, example: Tensor) -> tuple[Stage, ...]:
    """List the stages of a run, and leave the first one's parameters requiring gradients.

    Features are kept only where every step shows the images as they are, or each with its mirror image; a random view
    differs from step to step. Only the first stage keeps features.

    Args:
        model: the whole model.
        config: the resolved configuration.
        example: a few synthetic images, (N, C, H, W).
    """
    transfer = config.transfer
    if transfer is None:
        first, later = single_stage(model), ()
    elif transfer.trained == "head_then_all":
        first = Stage(0, trained_names(model, "head"), model)
        # The engine keeps one plan per module: the next stage, which runs the whole model again, needs its own.
        later = (Stage(transfer.head_steps or 0, trained_names(model, "all"), copy.copy(model)),)
    else:
        first, later = Stage(0, trained_names(model, transfer.trained, stages=transfer.stages), model), ()
    set_trained(model, first)
    return (_on_features(first, config, example), *later)


def set_trained(model: nn.Module, stage: Stage) -> None:
    """Let exactly the stage's parameters require gradients."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in stage.trained)


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """Find the stage of ``step``, counted from zero."""
    return [stage for stage in stages if stage.first_step <= step][-1]


def mirrored(views: ViewsConfig) -> bool:
    """Whether each step shows an image and its mirror image: two views that differ by a flip alone."""
    return views.count == 2 and views.flip > 0 and views == ViewsConfig(count=2, flip=views.flip, padding=views.padding)


def head_of(model: nn.Module) -> str:
    """Name the module that owns the model's last parameter: the classifier."""
    names = [name for name, _ in model.named_parameters()]
    if not names or "." not in names[-1]:
        raise ArgumentError("the model has no last layer with parameters of its own, so there is no head to replace.")
    return names[-1].rpartition(".")[0]


def blocks_of(model: nn.Module) -> list[str]:
    """Name the model's blocks in their order, the head last; ``transfer.stages`` counts them.

    A block is a child of the model that has parameters. A child that is itself a chain of blocks (a Sequential whose
    parts have parts of their own) counts as many as it has.
    """
    found: list[str] = []
    for name, child in model.named_children():
        parts = list(child.named_children()) if isinstance(child, (nn.Sequential, nn.ModuleList)) else []
        chain = any(True for _, part in parts for _ in part.children())
        names = [f"{name}.{part}" for part, _ in parts] if chain else [name]
        found += [block for block in names if any(True for _ in model.get_submodule(block).parameters())]
    return found


def trained_names(model: nn.Module, trained: Trained, *, stages: int | None = None) -> frozenset[str]:
    """Name the parameters to train: those of the ``head``, of the ``last`` ``stages`` blocks, or ``all``."""
    names = [name for name, _ in model.named_parameters()]
    if trained == "all":
        return frozenset(names)
    owners = [head_of(model)]
    if trained == "last":
        blocks = blocks_of(model)
        if stages is None or stages > len(blocks):
            raise ArgumentError(f"stages must be 1 to {len(blocks)} for this model, got {stages}.")
        owners = blocks[-stages:]
    return frozenset(name for name in names if any(name.startswith(f"{owner}.") for owner in owners))


def _on_features(stage: Stage, config: RunConfig, example: Tensor) -> Stage:
    """The same stage on kept features, where the model can be cut and the features fit into memory."""
    as_it_is = config.views == ViewsConfig(padding=config.views.padding)
    # An own model's frozen layers could mix rows in a way that a few synthetic rows do not show: each step runs them.
    own = config.model is not None and is_own(config.model.name)
    # Maps are as large as images: there is nothing to gain from keeping them.
    if (
        own
        or config.task == "segmentation"
        or config.cache_features == "off"
        or not (as_it_is or mirrored(config.views))
    ):
        return stage
    cut = split(stage.network, example)
    if cut is None:
        return stage
    dtype = _dtype(features_of(cut.backbone, example)[0].numel() * config.views.count, config)
    if dtype is None:
        return stage
    return Stage(stage.first_step, stage.trained, cut.rest, cut.backbone, dtype, mirrored(config.views))


def _dtype(numbers_per_row: int, config: RunConfig) -> torch.dtype | None:
    """Choose float32, float16 or nothing (None) for kept features, from declared numbers only."""
    numbers = numbers_per_row * required(config.privacy.num_units, "num_units")
    numbers *= required(config.data.rows_per_unit, "rows_per_unit")
    if 4 * numbers <= FEATURE_BYTES:
        return torch.float32
    return torch.float16 if 2 * numbers <= FEATURE_BYTES else None


# ---- The model, and how the engine computes its gradients


def create_model(config: RunConfig, splits: RunSplits, *, seed: int, code: RunCode = NO_CODE) -> nn.Module:
    """Build the configured model for the data's classes and channels, with weights drawn from ``seed``.

    Raises:
        ArgumentError: the model is own code, and ``code`` has none.
    """
    chosen = required(config.model, "model")
    outputs, image_shape = outputs_for(config.task, splits.train.num_classes), splits.train.image_shape
    if code.model is not None:
        return models.create_own(code.model, num_classes=outputs, image_shape=image_shape, seed=seed)
    if is_own(chosen.name):
        raise ArgumentError(f"the model of this run is own code: name it with --model {chosen.name}.")
    return models.create(chosen.name, num_classes=outputs, in_channels=image_shape[0], seed=seed, **chosen.options)


def model_and_stages(
    config: RunConfig, splits: RunSplits, device: str, code: RunCode = NO_CODE
) -> tuple[nn.Module, tuple[Stage, ...]]:
    """Build the model in training mode, with the same public weights for every run, and its stages.

    Raises:
        ArgumentError: the model can't take images of this shape, or an own model gives no scores for them.
    """
    model = create_model(config, splits, seed=0, code=code).to(device).train()
    example, _ = synthetic_like(splits, device)
    if code.model is not None:
        outputs, maps = outputs_for(config.task, splits.train.num_classes), splits.train.per_pixel
        problem = models.output_problem(model, example, outputs, maps=maps)
        if problem is not None:
            raise ArgumentError(f"{code.model.name}: the model {problem[0]}. {problem[1]}")
    with shape_errors(splits.train.image_shape):
        if config.task == "segmentation":
            with torch.no_grad():
                model(example[:1])  # refuses impossible sizes early
        return model, training_stages(model, config, example)


def choose_gradient_plans(
    model: nn.Module,
    stages: Sequence[Stage],
    config: RunConfig,
    splits: RunSplits,
    device: str,
    code: RunCode = NO_CODE,
) -> None:
    """Let the engine decide how it computes each stage's gradients, before the model gets the run's own weights.

    The decision changes the last bits of a sum. Taken again at a checkpoint's weights, it could differ, and a repeated
    step would release another sum under the same noise.
    """
    inputs, targets = synthetic_like(splits, device)
    rows = required(config.data.rows_per_unit, "rows_per_unit") * config.views.count
    unit = torch.full((1, rows), 1 / rows, dtype=torch.float64, device=device)
    decide = functools.partial(plan_for, own_code=code.is_given) if config.privacy.enabled else fast_plan
    for stage in stages:
        set_trained(model, stage)
        seen = inputs if stage.backbone is None else features_of(stage.backbone, inputs)
        like = Microbatch(seen[:1].repeat_interleave(rows, 0), targets[:1].repeat_interleave(rows, 0), unit)
        with shape_errors(splits.train.image_shape):
            decide(stage.network, loss_of(config, splits, code), like, config.performance)


def check_units_separate(
    model: nn.Module, config: RunConfig, splits: RunSplits, device: str, code: RunCode = NO_CODE
) -> list[Finding]:
    """Check on synthetic images that units do not mix and that gradients are right.

    Returns:
        Findings that do not forbid training; those about more than three frozen layers are joined into one.

    Raises:
        ArgumentError: the model can't be trained privately.
    """
    inputs, targets = synthetic_like(splits, device)
    own = code.is_given
    errors = code_errors("the model and its loss can't be trained") if own else shape_errors(splits.train.image_shape)
    with errors:
        findings = require_private_ready(model, loss_of(config, splits, code), inputs, targets, own_code=own)
    frozen = [finding for finding in findings if finding.problem.startswith(FROZEN)]
    if config.transfer is not None and config.transfer.trained != "all":
        return [finding for finding in findings if finding not in frozen]  # meant: the configuration freezes them
    if len(frozen) <= MOST_FROZEN:
        return findings
    problem = f"{len(frozen)} layers are {FROZEN}, stay as they are"
    whole = Finding(module="the model", problem=problem, remedy=frozen[0].remedy, fatal=False)
    return [whole, *(finding for finding in findings if finding not in frozen)]


def inspect_model(
    model: nn.Module, *, image_shape: tuple[int, int, int], num_classes: int, own_code: bool = True
) -> list[Finding]:
    """List what prevents training ``model`` privately as a classifier, and what is worth knowing."""
    inputs, targets = synthetic_rows(image_shape, num_classes, "cpu")
    with shape_errors(image_shape):
        return check_model(model, classification_loss, inputs, targets, own_code=own_code)


def loss_of(config: RunConfig, splits: RunSplits, code: RunCode = NO_CODE) -> RowLoss:
    """The loss of a run, one value per row; equal for equal arguments.

    Raises:
        ArgumentError: the loss is own code, and ``code`` has none.
    """
    name = required(config.loss, "loss")
    if code.loss is not None:
        return code.loss.value
    if is_own(name):
        raise ArgumentError(f"the loss of this run is own code: name it with --loss {name}.")
    return loss_for(config.task, name, splits.train.num_classes)


def synthetic_rows(
    image_shape: tuple[int, int, int],
    num_classes: int,
    device: str,
    *,
    per_pixel: bool = False,
    multi_label: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw four inputs and their targets (classes, masks of classes, or findings) from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn((SYNTHETIC_ROWS, *image_shape), generator=generator).to(device)
    if multi_label:
        return inputs, torch.randint(2, (SYNTHETIC_ROWS, num_classes), generator=generator).float().to(device)
    shape = (SYNTHETIC_ROWS, *(image_shape[1:] if per_pixel else ()))
    return inputs, torch.randint(num_classes, shape, generator=generator).to(device)


def synthetic_like(splits: RunSplits, device: str) -> tuple[Tensor, Tensor]:
    """Synthetic rows of the shape that a run trains on."""
    store = splits.train
    return synthetic_rows(
        store.image_shape, store.num_classes, device, per_pixel=store.per_pixel, multi_label=store.multi_label
    )


def shape_errors(image_shape: tuple[int, int, int]) -> AbstractContextManager[None]:
    """Re-raise torch's shape errors as an ArgumentError that names the image shape."""
    shape = "×".join(map(str, image_shape))
    saying = f"the model can't be trained on images of shape {shape}"
    return translated_errors(RuntimeError, ValueError, IndexError, saying=saying)


# ---- Features of a frozen backbone


@final
@dataclass(frozen=True)
class SplitFeatures:
    """Features of both splits: ``train`` is as private as the images, ``test`` is declared public."""

    train: Features
    test: Features


def split_features(
    stage: Stage,
    config: RunConfig,
    splits: RunSplits,
    *,
    normalisation: Normalisation,
    device: str,
    callback: RunCallback,
    ranks: Ranks = ALONE,
) -> SplitFeatures | None:
    """Compute or load the features that a stage trains on; None where it trains on images.

    Args:
        stage: the stage that the next step belongs to.
        config: the resolved configuration.
        splits: the data.
        normalisation: the run's pixel constants.
        device: where to compute.
        callback: told how many rows are done.
        ranks: the processes that compute them; this is rank 0, and all get the result.

    Guarantee: nothing is released. A row's features depend on its own image and on public values alone.
    """
    if stage.backbone is None:
        return None
    backbone = frozen_copy(stage.backbone)

    def features(store: ImageStore, *, mirrored: bool) -> Features:
        def compute() -> Features:
            if ranks.several:
                ranks.tell({"do": "extract", "train": store is splits.train, "mirrored": mirrored})
            return stage_features(
                backbone,
                store,
                config,
                normalisation,
                mirrored=mirrored,
                dtype=stage.dtype,
                device=device,
                callback=callback,
                ranks=ranks,
            )

        if config.cache_features != "disk":
            return compute()
        how = f"{stage.dtype} {mirrored} {config.feature_precision} {kernels.identity()}"
        folder = cache_folder() if config.data.data_dir is None else Path(config.data.data_dir)
        return kept_features(folder / "features", _key(backbone, config, store, normalisation, how), compute)

    with config.performance.chosen_kernels():
        found = SplitFeatures(features(splits.train, mirrored=stage.mirrored), features(splits.test, mirrored=False))
    if ranks.several:
        ranks.tell({"do": "features", "shape": list(found.train.values_NWF.shape)})
        ranks.spread([found.train.values_NWF])
    return found


def frozen_copy(backbone: nn.Module) -> nn.Module:
    """Return a copy of the backbone for computing features."""
    copied = copy.deepcopy(backbone).eval()
    copied.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (faster convolutions on a CPU)
    return copied


def stage_features(
    backbone: nn.Module,
    store: ImageStore,
    config: RunConfig,
    normalisation: Normalisation,
    *,
    mirrored: bool,
    dtype: torch.dtype,
    device: str,
    callback: RunCallback,
    ranks: Ranks,
) -> Features:
    """Compute the features of one split; every rank computes its share, and rank 0 has them all."""
    synthetic = normalisation.apply(_synthetic_images(store.image_shape).to(device))
    with feature_forward(backbone, synthetic, config.feature_precision) as forward:
        return extract(
            forward,
            store.images,
            normalisation,
            mirrored=mirrored,
            dtype=dtype,
            device=device,
            progress=lambda what, done, total: callback.progressed(f"{what} of {store.name}", done=done, total=total),
            ranks=ranks,
        )


def features_of(backbone: nn.Module, inputs: Tensor) -> Tensor:
    """Run the backbone in evaluation mode; it is left unchanged."""
    with torch.no_grad():
        return copy.deepcopy(backbone).eval()(inputs)


@contextmanager
def feature_forward(backbone: nn.Module, synthetic: Tensor, precision: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield the backbone's forward: with fused layers where they agree on ``synthetic``, or in bfloat16 if asked."""
    half = precision == "bfloat16"
    with torch.autocast(synthetic.device.type, dtype=torch.bfloat16, enabled=half):
        if half:
            yield backbone
            return
        with fused_forward(backbone, synthetic) as forward:
            yield forward


def _synthetic_images(image_shape: tuple[int, int, int]) -> Tensor:
    """Two random uint8 images of that shape, on which forward passes are compared: no private image decides."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, *image_shape), generator=generator, dtype=torch.uint8)


def _key(backbone: nn.Module, config: RunConfig, store: ImageStore, normalisation: Normalisation, kind: str) -> str:
    """Digest everything that the features follow from, up to the last bits of threads and processor."""
    model = "" if config.model is None else config.model.model_dump_json()
    facts = (code_digest(), torch.__version__, model, str(backbone), store.fingerprint(), str(normalisation), kind)
    digest = hashlib.sha256("\n".join(facts).encode())
    for name, value in (*backbone.named_parameters(), *backbone.named_buffers()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
