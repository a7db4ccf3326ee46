"""Features of a frozen front: the same training without the front's work, and nothing that was not there before."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpvision.training.stages as features_module
import dpvision.training.stages as phases_module
from dpvision import kernels as native
from dpvision import models
from dpvision.config import Performance, RunConfig
from dpvision.data import (
    FeatureDraws,
    Features,
    ImageBatches,
    extract,
    fixed_normalisation,
    kept_features,
    store_of_arrays,
)
from dpvision.data.features import BATCH
from dpvision.data.splits import load_splits
from dpvision.gradients.clipped_sum import clipped_sum, clipped_sum_of_batch
from dpvision.inference import evaluate
from dpvision.inference.load import load_model
from dpvision.kernels import scatter as kernel
from dpvision.models import Scattering, split
from dpvision.models.losses import classification_loss
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.privacy.mechanism import OrdinarySampling
from dpvision.privacy.randomness import Keys
from dpvision.release.verify import verify
from dpvision.training import RunCallback, resume_training, train
from dpvision.training.stages import Stage, feature_forward, split_features, training_stages
from dpvision.training.start import start_run
from dpvision.training.trainer import take_step
from tiny_runs import CLASSES, SIDE, interrupt_run, synthetic_images, tiny_config, write_images

NORMALISATION = fixed_normalisation(1)
SCATTER: dict[str, Any] = {"name": "scatter_linear", "options": {"image_size": SIDE}}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures.npz")


def scatter_config(source: Path, **changes: Any) -> RunConfig:
    return tiny_config(source, model={**SCATTER, **changes.pop("model", {})}, **changes)


def weights_of(run: Path) -> bytes:
    return (run / "release" / "weights.safetensors").read_bytes()


def rows_of(images: np.ndarray) -> Tensor:
    return NORMALISATION.apply(torch.from_numpy(images))


# ---- cutting a model in two


def frozen_but(name: str, trained: str, **options: Any) -> nn.Module:
    model = models.create(name, num_classes=CLASSES, in_channels=1, seed=0, **options)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name.startswith(trained))
    return model


CUTS = [
    ("scatter_linear", "", {"image_size": 8}, ("3.weight", "3.bias")),
    ("scatter_linear", "", {"image_size": 8, "fine": True}, ("1.weight", "1.bias")),
    ("scatter_cnn", "", {"image_size": 8}, None),
    ("shoefit_cnn", "9.", {"image_size": 8}, ("9.weight", "9.bias")),
    ("resnet9", "classifier.", {}, ("classifier.weight", "classifier.bias")),
    ("efficientnet_lite0", "fc.", {}, ("fc.weight", "fc.bias")),
    ("vgg16_conv3", "features.14", {}, None),
]


@pytest.mark.parametrize(("name", "trained", "options", "names"), CUTS)
def test_front_and_rest_are_the_model_under_its_own_names(
    name: str, trained: str, options: dict[str, Any], names: tuple[str, ...] | None
) -> None:
    model = frozen_but(name, trained, **options).eval()
    x = torch.randn(3, 1, 8 if options else 32, 8 if options else 32, generator=torch.Generator().manual_seed(0))
    cut = split(model, x)
    assert cut is not None
    torch.testing.assert_close(cut.rest(cut.backbone(x)), model(x))
    own = dict(model.named_parameters())
    learning = {n for n, p in own.items() if p.requires_grad}
    of_rest = dict(cut.rest.named_parameters())
    assert all(own[n] is p for n, p in of_rest.items())
    assert learning <= of_rest.keys()
    assert not any(p.requires_grad for p in cut.backbone.parameters())
    assert names is None or tuple(of_rest) == names


def test_a_front_without_weights_or_constants_is_no_work_worth_saving() -> None:
    x = torch.randn(2, 1, 8, 8)
    assert split(models.create("linear", num_classes=3, in_channels=1, image_size=8, seed=0), x) is None


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm2d(2)])
def test_a_front_that_differs_between_training_and_evaluation_is_not_cut_off(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), layer, nn.Flatten(), nn.Linear(72, 3))
    for parameter in (*model[0].parameters(), *model[1].parameters()):
        parameter.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert split(model, torch.randn(2, 1, 8, 8)) is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Centres(nn.Module):
    """A BatchNorm in disguise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.scale


def test_a_front_that_mixes_rows_is_not_cut_off() -> None:
    assert split(nn.Sequential(Centres(), nn.Flatten(), nn.Linear(64, 3)), torch.randn(4, 1, 8, 8)) is None


class Skips(nn.Module):
    """Its children are not run one after the other, although their shapes would allow it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)) + x)


def test_a_model_that_is_no_chain_is_not_cut() -> None:
    model = Skips()
    model.first.requires_grad_(False)
    assert split(model, torch.randn(2, 4)) is None


# ---- features


def test_a_rows_features_depend_neither_on_how_many_rows_there_are_nor_on_its_place() -> None:
    scattering = Scattering((SIDE, SIDE))
    images = torch.from_numpy(synthetic_images(BATCH + 3)[0])
    many = extract(scattering, images, NORMALISATION, mirrored=False, dtype=torch.float32)
    few = extract(scattering, images[:5], NORMALISATION, mirrored=False, dtype=torch.float32)
    moved = extract(scattering, images[3:], NORMALISATION, mirrored=False, dtype=torch.float32)
    assert torch.equal(many.values_NWF[:5], few.values_NWF)
    assert torch.equal(many.values_NWF[3:], moved.values_NWF)
    torch.testing.assert_close(many.values_NWF[:, 0], scattering(NORMALISATION.apply(images)))


@pytest.mark.parametrize(
    "front",
    [
        Scattering((SIDE, SIDE)),
        nn.Sequential(Scattering((SIDE, SIDE)), nn.GroupNorm(27, 81, affine=False), nn.Flatten()),
        nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten()
        ),
    ],
    ids=["scattering", "norm", "convolutions"],
)
def test_a_rows_features_by_fast_layers_depend_neither_on_other_rows_nor_on_its_place(front: nn.Module) -> None:
    images = torch.from_numpy(synthetic_images(BATCH + 3)[0])
    whole = nn.Sequential(front)
    with feature_forward(whole, NORMALISATION.apply(images[:2]), "float32") as look:
        assert (look is not whole) == native.available()
        many, few, moved = (
            extract(look, some, NORMALISATION, mirrored=False, dtype=torch.float32).values_NWF
            for some in (images, images[:5], images[3:])
        )
    assert torch.equal(many[:5], few)
    assert torch.equal(many[3:], moved)


def test_no_private_picture_decides_which_layers_make_the_features(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Tensor] = []
    true = features_module.fused_forward

    def seen(model: nn.Module, rows: Tensor) -> Any:
        compared.append(rows)
        return true(model, rows)

    monkeypatch.setattr(features_module, "fused_forward", seen)
    others = tmp_path / "others.npz"
    (images, labels), (test_images, test_labels) = synthetic_images(60, seed=77), synthetic_images(30, seed=78)
    np.savez(others, x_train=images, y_train=labels, x_test=test_images, y_test=test_labels)
    for number, source in enumerate((pictures, others)):
        session, _ = start_run(scatter_config(source), tmp_path / str(number), seed=3, device="cpu")
        session.folder.close()
    assert len(compared) == 4  # training and test pictures of two runs
    assert all(torch.equal(rows, compared[0]) for rows in compared)


def test_half_precision_keeps_features_finite() -> None:
    features = extract(
        lambda x: x.flatten(1) * 1e9, torch.full((2, 1, 4, 4), 255, dtype=torch.uint8), NORMALISATION,
        mirrored=False, dtype=torch.float16,
    )  # fmt: skip
    assert torch.isfinite(features.values_NWF).all()


def draws_of(images: np.ndarray, labels: np.ndarray, *, owners: Any = None, rows_per_unit: int = 1) -> ImageBatches:
    names = [str(label) for label in range(CLASSES)]
    store = store_of_arrays(images=images, labels=labels, class_names=names, name="made up", unit_names=owners)
    return ImageBatches(
        mechanism=OrdinarySampling(num_units=20, expected_batch_size=12.0, steps=5),
        store=store,
        normalisation=NORMALISATION,
        keys=Keys.from_seed(1),
        rows_per_unit=rows_per_unit,
    )


@pytest.mark.parametrize("rows_per_unit", [1, 3])
def test_draws_of_features_are_the_draws_of_their_pictures(rows_per_unit: int) -> None:
    images, labels = synthetic_images(40)
    owners = None if rows_per_unit == 1 else np.arange(40) // 4
    draws = draws_of(images, labels, owners=owners, rows_per_unit=rows_per_unit)
    features = extract(lambda x: x.flatten(1), torch.from_numpy(images), NORMALISATION, mirrored=False,
                       dtype=torch.float32)  # fmt: skip
    of_features = FeatureDraws(draws, features, torch.from_numpy(labels), "cpu")
    for step in range(3):
        pairs = zip(draws.batch(step).microbatches(5), of_features.batch(step).microbatches(5), strict=True)
        for pictures, rows in pairs:
            assert torch.equal(pictures.inputs.flatten(1), rows.inputs)
            assert torch.equal(pictures.targets, rows.targets)
            assert torch.equal(pictures.row_weights_UR, rows.row_weights_UR)
    assert of_features.batch(0).sampling == draws.sampling


def test_a_picture_and_its_mirror_image_are_one_unit_with_half_a_share_each() -> None:
    images, labels = synthetic_images(20)
    draws = draws_of(images, labels)
    features = extract(lambda x: x.flatten(1), torch.from_numpy(images), NORMALISATION, mirrored=True,
                       dtype=torch.float32)  # fmt: skip
    batch = FeatureDraws(draws, features, torch.from_numpy(labels), "cpu").batch(0)
    drawn = draws.units(0)
    (piece,) = batch.microbatches(len(drawn) + 1)
    x = rows_of(images[drawn])
    assert torch.equal(piece.inputs[0:-2:2], x.flatten(1))
    assert torch.equal(piece.inputs[1:-2:2], x.flip(-1).flatten(1))
    assert piece.row_weights_UR.tolist() == [[0.5, 0.5]] * len(drawn) + [[0.0, 0.0]]
    assert not piece.inputs[-2:].any()
    model = nn.Linear(SIDE * SIDE, CLASSES)
    pairs = torch.stack([x, x.flip(-1)], dim=1).reshape(-1, SIDE * SIDE)
    targets = torch.from_numpy(labels[drawn]).repeat_interleave(2)
    by_hand = clipped_sum(model, classification_loss, pairs, targets, clip_norm=0.1, rows_per_unit=2)
    found = clipped_sum_of_batch(model, classification_loss, batch, clip_norm=0.1, performance=Performance())
    for name, value in by_hand.gradients.items():
        torch.testing.assert_close(found.gradients[name].float(), value)
    # One unit leaves: the sum moves by one clip norm at most, not by one for each of its rows.
    less = clipped_sum(model, classification_loss, pairs[2:], targets[2:], clip_norm=0.1, rows_per_unit=2)
    moved = sum(float((by_hand.gradients[n] - less.gradients[n]).square().sum()) for n in less.gradients) ** 0.5
    assert 0 < moved <= 0.1 * (1 + 1e-5)


# ---- runs


def test_a_run_with_two_views_that_differ_by_a_flip_keeps_mirror_images_of_training_pictures_alone(
    tmp_path: Path, pictures: Path
) -> None:
    config = scatter_config(pictures, views={"count": 2, "flip": 0.5})
    session, _ = start_run(config, tmp_path / "run", seed=3, device="cpu")
    session.folder.close()
    assert session.features is not None
    scattered = session.stage.backbone
    assert scattered is not None
    x = session.normalisation.apply(session.splits.train.images)
    kept_NWF = session.features.train.values_NWF
    assert kept_NWF.shape[1] == 2
    for way, images in enumerate((x, x.flip(-1))):
        torch.testing.assert_close(kept_NWF[:, way].float(), scattered(images), rtol=1e-3, atol=1e-3)
    assert session.features.test.values_NWF.shape[1] == 1


def test_the_figures_of_a_run_on_features_are_those_of_the_released_model(tmp_path: Path, pictures: Path) -> None:
    train(scatter_config(pictures, model={"name": "scatter_cnn"}), run=tmp_path / "run", seed=3)
    assert verify(tmp_path / "run").ok
    ready = load_model(tmp_path / "run")
    figures = json.loads((tmp_path / "run" / "release" / "metrics.json").read_text())["final"]
    images, labels = synthetic_images(30, seed=1)
    store = store_of_arrays(images=images, labels=labels, class_names=ready.class_names, name="test")
    again = evaluate(ready.model, store, ready.normalisation)
    assert again.accuracy == figures["accuracy"]
    assert again.loss == pytest.approx(figures["loss"], rel=1e-5)


def steps_taken(tmp_path: Path, config: RunConfig, keys: Keys) -> dict[str, Tensor]:
    session, _ = start_run(config, tmp_path, seed=3, device="cpu")
    # The same keys whatever the configuration says: now noise, draws and first weights are equal.
    session.keys = keys
    assert session.privatizer is not None
    session.privatizer._keys = keys
    session.image_draws._sampler = replace(session.image_draws._sampler, keys=keys)
    for name, value in session.model.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    session.optimizer._guard.accept(dict(session.model.named_parameters()))
    for _ in range(6):
        take_step(session)
    session.folder.close()
    return {name: value.clone() for name, value in session.model.state_dict().items()}


@pytest.mark.parametrize("name", ["scatter_linear", pytest.param("scatter_cnn", marks=pytest.mark.slow)])
def test_steps_on_features_are_steps_on_pictures_up_to_rounding(tmp_path: Path, pictures: Path, name: str) -> None:
    keys = Keys.from_seed(9)
    configs = [scatter_config(pictures, model={"name": name}, cache_features=kept) for kept in ("memory", "off")]
    found = [steps_taken(tmp_path / str(number), config, keys) for number, config in enumerate(configs)]
    for parameter, value in found[0].items():
        torch.testing.assert_close(value, found[1][parameter], rtol=1e-4, atol=1e-5)


@final
class Scattered:
    """Counts the rows that are scattered, by the layer itself and by the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_layer: list[int] = []
        self.by_kernel: list[int] = []
        layer, native_scatter = Scattering.forward, kernel.scatter._run

        def in_layer(module: Scattering, x: Tensor) -> Tensor:
            self.by_layer.append(len(x))
            return layer(module, x)

        def in_kernel(x: Tensor, *tables: Any) -> Tensor:
            self.by_kernel.append(len(x))
            return native_scatter(x, *tables)

        monkeypatch.setattr(Scattering, "forward", in_layer)
        monkeypatch.setattr(kernel.scatter, "_run", in_kernel)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_the_front_works_once_and_not_at_every_step(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    scattered = Scattered(monkeypatch)
    counts = []
    for steps in (2, 12):
        scattered.by_layer.clear()
        scattered.by_kernel.clear()
        config = scatter_config(pictures, privacy={"steps": steps}, performance={"kernels": kernels})
        train(config, run=tmp_path / str(steps), seed=3)
        counts.append((len(scattered.by_layer), len(scattered.by_kernel)))
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 0


@pytest.mark.parametrize(("kept", "after"), [("memory", 7), ("disk", 3)])
def test_an_interrupted_run_on_features_equals_an_uninterrupted_one(
    tmp_path: Path, pictures: Path, after: int, kept: str
) -> None:
    config = scatter_config(pictures, cache_features=kept, data={"data_dir": str(tmp_path)})
    train(config, run=tmp_path / "whole", seed=3)
    interrupt_run(tmp_path / "cut", config, after=after)
    assert resume_training(tmp_path / "cut").outcome == "finished"
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")


def test_features_on_disk_are_for_their_owner_only_and_spare_the_second_run_the_work(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = scatter_config(pictures, cache_features="disk", data={"data_dir": str(tmp_path)})
    train(config, run=tmp_path / "a", seed=3)
    folder = tmp_path / "features"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.iterdir())
    assert len(files) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    monkeypatch.setattr("dpvision.training.stages.extract", None)  # not called again
    train(config, run=tmp_path / "b", seed=3)
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")


def test_damaged_features_on_disk_are_computed_anew(tmp_path: Path) -> None:
    def compute() -> Features:
        return Features(torch.arange(6.0).reshape(3, 1, 2))

    kept_features(tmp_path / "f", "key", compute)
    (path,) = (tmp_path / "f").iterdir()
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:-4] + b"\0\0\0\1", b"", b"not numpy at all"):
        path.write_bytes(content)
        assert torch.equal(kept_features(tmp_path / "f", "key", compute).values_NWF, compute().values_NWF)
    assert path.read_bytes() == whole


def test_features_of_other_pictures_or_other_constants_have_another_key(tmp_path: Path, pictures: Path) -> None:
    data = {"data_dir": str(tmp_path)}
    train(scatter_config(pictures, cache_features="disk", data=data), run=tmp_path / "a", seed=3)
    none = {**data, "normalisation": "none"}
    train(scatter_config(pictures, cache_features="disk", data=none), run=tmp_path / "b", seed=3)
    assert len(list((tmp_path / "features").iterdir())) == 4


def test_features_in_bfloat16_are_near_those_in_full_and_have_a_key_of_their_own(
    tmp_path: Path, pictures: Path
) -> None:
    torch.manual_seed(0)
    phase = Stage(0, frozenset(), nn.Identity(), backbone=nn.Conv2d(1, 4, 3))
    found = []
    for precision in ("float32", "bfloat16"):
        settings = {"cache_features": "disk", "feature_precision": precision, "data": {"data_dir": str(tmp_path)}}
        config = scatter_config(pictures, **settings)
        loaded = load_splits(config, Keys.from_seed(0))
        features = split_features(
            phase, config, loaded, normalisation=NORMALISATION, device="cpu", callback=RunCallback()
        )
        assert features is not None
        found.append(features.train.values_NWF)
    full, half = found
    assert full.dtype == half.dtype == torch.float32
    assert not torch.equal(full, half)
    torch.testing.assert_close(full, half, rtol=0.03, atol=0.03)
    assert len(list((tmp_path / "features").iterdir())) == 4


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.reason()}")
def test_features_by_kernels_are_near_the_plain_ones_and_have_a_key_of_their_own(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scattered = Scattered(monkeypatch)
    found = []
    for kernels in ("native", "plain"):
        settings = {"cache_features": "disk", "performance": {"kernels": kernels}, "data": {"data_dir": str(tmp_path)}}
        session, _ = start_run(scatter_config(pictures, **settings), tmp_path / kernels, seed=3, device="cpu")
        session.folder.close()
        assert session.features is not None
        found.append((session.features.train.values_NWF.float(), len(scattered.by_kernel)))
    (fast, calls), (plain, calls_after) = found
    torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-3)
    assert not torch.equal(fast, plain)
    assert BATCH in scattered.by_kernel
    assert calls == calls_after
    assert len(list((tmp_path / "features").iterdir())) == 4


def test_other_features_than_the_run_began_with_are_a_fork(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeating a step on features with other last bits would give two sums under one noise."""
    interrupt_run(tmp_path / "run", scatter_config(pictures), after=7)

    def other_bits(*arguments: Any, **keywords: Any) -> Features:
        return Features(extract(*arguments, **keywords).values_NWF * (1 + 2e-7))

    monkeypatch.setattr("dpvision.training.stages.extract", other_bits)
    resume_training(tmp_path / "run")
    entries = read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")
    assert [e.payload["reason"] for e in entries if e.kind == "fork"] == ["changed: features"]
    assert sum(count for _, count in charges_of(entries)) == 12


def session_draws(tmp_path: Path, config: RunConfig) -> type:
    session, _ = start_run(config, tmp_path, seed=3, device="cpu")
    session.folder.close()
    return type(session.draws)


def test_random_views_are_made_of_pictures(tmp_path: Path, pictures: Path) -> None:
    plain, both, cropped = {}, {"count": 2, "flip": 0.5}, {"count": 2, "flip": 0.5, "crop_padding": 1}
    for number, (views, kind) in enumerate([(plain, FeatureDraws), (both, FeatureDraws), (cropped, ImageBatches)]):
        values = scatter_config(pictures).model_dump()
        config = RunConfig.model_validate({**values, "views": views})
        assert session_draws(tmp_path / str(number), config) is kind


def test_a_run_on_pictures_and_their_mirror_images_resumes_and_says_so(tmp_path: Path, pictures: Path) -> None:
    config = RunConfig.model_validate({**scatter_config(pictures).model_dump(), "views": {"count": 2, "flip": 0.5}})
    result = train(config, run=tmp_path / "whole", seed=3)
    interrupt_run(tmp_path / "cut", config, after=7)
    resume_training(tmp_path / "cut")
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    assert any("mirror image" in item["how"] for item in result.certificate["declared"])


@pytest.mark.parametrize(("limit", "kept"), [(80_000, torch.float32), (50_000, torch.float16), (30_000, None)])
def test_declared_numbers_alone_decide_how_precisely_features_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, kept: torch.dtype | None
) -> None:
    monkeypatch.setattr(phases_module, "FEATURE_BYTES", limit)  # 60 units of 324 numbers: 77,760 bytes in full
    for rows in (60, 61):
        write_images(tmp_path / "pictures.npz", train=rows)
        config = scatter_config(tmp_path / "pictures.npz", data={"rows_per_unit": 1})
        model = models.create("scatter_linear", num_classes=CLASSES, in_channels=1, seed=0, image_size=SIDE)
        (phase,) = training_stages(model, config, torch.randn(2, 1, SIDE, SIDE))
        assert (phase.backbone is None) == (kept is None)
        assert kept is None or phase.dtype == kept


def test_a_run_in_half_precision_is_a_run(tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases_module, "FEATURE_BYTES", 50_000)
    result = train(scatter_config(pictures), run=tmp_path / "run", seed=3)
    assert result.outcome == "finished"
    assert verify(tmp_path / "run").ok
