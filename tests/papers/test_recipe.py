"""Recipes: they are what the papers say, they run, and they claim nothing that was not measured."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from dpvision import models
from dpvision.accounting import mechanism_guarantee
from dpvision.cli import app
from dpvision.config import RunConfig, parse_config
from dpvision.data.store import store_of_arrays
from dpvision.errors import ArgumentError
from dpvision.papers import (
    NOT_RUN,
    Recipe,
    all_recipes,
    find_recipe,
    place_data,
    quick_config,
    recipe_data,
    smoothnets,
)
from dpvision.papers.recipe import changed
from dpvision.privacy.mechanism import Mechanism
from dpvision.release.verify import verify
from dpvision.training import train
from dpvision.training.stages import trained_names

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [config for recipe in all_recipes() for config in (recipe.config, recipe.cpu) if config is not None]


def dpvision(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def named(recipe: Recipe) -> str:
    return recipe.name


def test_names_are_unique_and_fit_into_paths() -> None:
    names = [config.name for config in CONFIGS]
    assert not [name for name, count in Counter(names).items() if count > 1]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) for name in names)


def test_every_configuration_survives_json_and_names_options_that_its_model_has() -> None:
    for config in CONFIGS:
        assert parse_config(config.to_json()) == config
        assert config.model is not None
        assert set(config.model.options) <= set(models.entry(config.model.name).options), config.name


def test_every_private_plan_is_possible_and_its_delta_is_at_most_about_one_over_the_units() -> None:
    for config in CONFIGS:
        privacy = config.privacy
        assert privacy.num_units is not None
        assert privacy.expected_batch_size is not None
        assert privacy.steps is not None
        assert privacy.expected_batch_size <= privacy.num_units, config.name
        if privacy.enabled:
            assert privacy.delta is not None
            # Two sources sit at the border: 1e-5 for 100,000 images, 8e-7 for 1,271,167. One, 1e-6, is beyond it.
            most = 1.28 if "kurakin" in config.name else 1.02
            assert privacy.delta * privacy.num_units < most, config.name
            assert privacy.clip_norm is not None


def test_a_schedule_that_looks_at_a_metric_declares_it_public() -> None:
    looking = [config for config in CONFIGS if config.schedule.kind == "plateau"]
    assert looking
    assert all(config.schedule.public_metric for config in looking)


def test_a_figure_of_ours_stands_in_the_results_with_its_n() -> None:
    results = (ROOT / "docs" / "evidence" / "results.md").read_text()
    claimed = [recipe for recipe in all_recipes() if recipe.ours != NOT_RUN and recipe.name != "demo"]
    assert len(claimed) >= 3
    for recipe in claimed:
        found = re.fullmatch(r"(\d+\.\d+(?: ± \d+\.\d+)?) % \(n = (\d+)\)", recipe.ours)
        assert found, recipe.ours
        assert ("±" in found[1]) == (found[2] != "1")
        row = next(line for line in results.splitlines() if f"`{recipe.name}`" in line)
        assert f"| {found[1]} | {found[2]} |" in row


def test_data_and_weights_that_can_not_be_downloaded_are_named_in_one_line() -> None:
    for recipe in all_recipes():
        assert "\n" not in (recipe.needs or "")
        source = recipe.config.data.source
        at_hand = source in ("digits", "mnist", "fashionmnist", "cifar10", "cifar100") or source.endswith(".npz")
        assert at_hand or recipe.needs, recipe.name
        foreign = recipe.config.transfer is not None and recipe.after is None
        assert not foreign or recipe.needs, recipe.name


def test_weights_of_another_recipe_are_those_of_its_first_run_at_the_same_scale() -> None:
    later = [recipe for recipe in all_recipes() if recipe.after is not None]
    assert later
    for recipe in later:
        before = find_recipe(recipe.after or "")
        for config, first in ((recipe.config, before.config), (recipe.cpu, before.cpu)):
            assert config is not None
            assert first is not None
            assert config.transfer is not None
            assert config.transfer.weights == f"runs/{first.name}-1"
            assert config.model is not None
            assert first.model is not None
            assert config.model.name == first.model.name


def test_every_name_in_the_docs_is_a_recipe() -> None:
    text = (ROOT / "docs" / "reference" / "recipes.md").read_text()
    quoted = re.findall(r"`((?:mnist|fashion|cifar10|cifar100|imagenette|tiny|imagenet)-[a-z0-9._-]+)`", text)
    named_in_commands = re.findall(r"--recipe ([a-z0-9._-]+)", text)
    assert len(quoted) > 15
    folders = {"tiny-imagenet-200"}
    assert {*quoted, *named_in_commands} - folders <= {recipe.name for recipe in all_recipes()}


def test_the_thesis_freezes_everything_before_conv4() -> None:
    config = find_recipe("cifar10-scaleresnet9-from-cifar100").config
    assert config.transfer is not None
    model = models.create("scaleresnet9", seed=0)
    learning = trained_names(model, config.transfer.trained, stages=config.transfer.stages)
    assert {name.split(".")[0] for name in learning} == {"conv4", "res2", "classifier"}


def work(config: RunConfig) -> float:
    """Rows that pass through the network, times their area."""
    side = config.data.image_size or 32
    return (config.privacy.expected_batch_size or 0) * (config.privacy.steps or 0) * config.views.count * side**2


def test_a_reduced_version_keeps_budget_and_model_and_says_what_it_reduces() -> None:
    for recipe in all_recipes():
        if recipe.cpu is None:
            continue
        whole, less = recipe.config, recipe.cpu
        assert recipe.reduction, recipe.name
        assert less.name == f"{recipe.name}-cpu"
        assert (less.privacy.target_epsilon, less.privacy.delta) == (whole.privacy.target_epsilon, whole.privacy.delta)
        assert less.privacy.enabled == whole.privacy.enabled
        assert less.model is not None
        assert whole.model is not None
        assert less.model.name == whole.model.name
        head_alone = whole.transfer is not None and whole.transfer.trained == "head"  # works on kept features
        assert head_alone or work(less) <= work(whole), recipe.name


def test_liver_recipes_protect_slices_as_the_thesis_does_or_patients_and_never_use_its_batch_loss() -> None:
    recipes = [recipe for recipe in all_recipes() if recipe.config.task == "segmentation"]
    assert len(recipes) == 30
    for recipe in recipes:
        for config in (recipe.config, recipe.cpu):
            assert config is not None
            assert config.data.units == ("owners" if "-patient-" in recipe.name else "rows")
            assert config.loss in ("dice", "dice_cross_entropy")
    table = find_recipe("liver-scaleunet9-eps3-groups16").config
    assert table.model is not None
    assert table.model.options == {"groups": 16, "head": "unit"}  # as in the source, which ends in norm and Mish
    assert any("not proved" in text for text in find_recipe("liver-scaleunet9-eps3-groups16").differs)


def test_the_small_liver_set_is_split_by_patient_once_and_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPVISION_DATA", str(tmp_path))
    config = find_recipe("liver-unet9-eps3").cpu
    assert config is not None
    with pytest.raises(ArgumentError, match="lits_liver_128"):
        place_data(config)
    (tmp_path / "lits-liver-128").mkdir()
    volume = np.repeat(np.arange(11) * 3, 2)
    masks = np.zeros((22, 16, 16), dtype=np.uint8)
    masks[:, 4:9, 4:9] = 1 + volume[:, None, None] % 2
    np.savez(tmp_path / "lits-liver-128" / "lits_liver_128.npz", images=40 * masks, masks=masks, volume=volume)
    with np.load(place_data(config).data.source) as made:
        assert set(made["volume"].tolist()).isdisjoint(made["test_volume"].tolist())
        assert sorted(set(made["test_volume"].tolist()), key=int) == ["3", "18"]
        assert len(made["images"]) + len(made["test_images"]) == 22
        assert made["masks"].max() == 2


@pytest.mark.parametrize(
    ("name", "noise", "epsilon"),
    [
        # The noise that reaches each epsilon by RDP, computed for the papers' settings (their rate is 1 / len(loader)).
        ("cifar10-resnet9-eps3", 1.694, 3.0),
        ("cifar10-scaleresnet9-eps10", 0.847, 10.0),
        ("cifar10-resnet9-eps7.5-epochs25", 0.825, 7.5),
        ("cifar10-resnet9-eps7.5-epochs90", 1.150, 7.5),
        ("tiny-scaleresnet9-eps5", 1.147, 5.0),
        ("cifar10-wrn16_4-eps1", 10.0, 0.988),
        ("cifar10-wrn16_4-eps4", 4.0, 3.996),
        ("cifar10-wrn40_4-eps8", 9.4, 7.990),
        ("imagenet-nf_resnet50-eps8", 2.5, 8.0),
        ("cifar10-wrn28_10-all-eps1", 21.1, 0.998),
    ],
)
def test_batch_and_steps_are_the_papers(name: str, noise: float, epsilon: float) -> None:
    privacy = find_recipe(name).config.privacy
    assert privacy.num_units is not None
    assert privacy.expected_batch_size is not None
    assert privacy.steps is not None
    mechanism = Mechanism(
        num_units=privacy.num_units,
        expected_batch_size=privacy.expected_batch_size,
        clip_norm=1.0,
        noise_multiplier=noise,
        steps=privacy.steps,
    )
    found = mechanism_guarantee(mechanism, delta=privacy.delta or 0, accountant="rdp").epsilon
    assert found == pytest.approx(epsilon, rel=0.02)  # 1024 / 50,000 is 0.4 % above 1 / 49


def test_a_scalenorm_recipe_is_the_papers_setting() -> None:
    recipe = find_recipe("cifar10-scaleresnet9-eps7.5")
    config = recipe.config
    assert (config.privacy.expected_batch_size, config.privacy.steps, config.privacy.clip_norm) == (1024, 2450, 1.5)
    assert config.optimizer is not None
    assert (config.optimizer.name, config.optimizer.learning_rate) == ("nadam", 1e-3)
    assert (config.schedule.kind, config.schedule.factor, config.schedule.patience) == ("plateau", 0.5, 3)
    assert config.evaluations == 50, "the papers' schedule looks once an epoch"
    assert config.model is not None
    assert config.model.options == {"groups": 32, "activation": "mish"}
    assert recipe.accuracy == 71.74


def test_a_recipe_of_de_et_al_is_the_papers_setting() -> None:
    config = find_recipe("cifar10-wrn40_4-eps8").config
    assert (config.views.count, config.views.crop_padding, config.views.padding, config.views.flip) == (
        32,
        4,
        "symmetric",
        0.5,
    )
    assert (config.privacy.clip_norm, config.privacy.unit_norm) == (1.0, True)
    assert (config.averaging.kind, config.averaging.decay) == ("ema", 0.9999)


@pytest.mark.parametrize("model", ["wrn40_4", "wrn16_4"])
def test_each_rung_of_the_ladder_adds_one_thing(model: str) -> None:
    rungs = [recipe.config for recipe in all_recipes() if f"-{model}-ladder" in recipe.name]
    assert len(rungs) == 6
    for lower, higher in pairwise(rungs):
        parts = ("model", "views", "averaging")
        changes = [part for part in parts if getattr(lower, part) != getattr(higher, part)]
        changes += ["batch"] * (lower.privacy.expected_batch_size != higher.privacy.expected_batch_size)
        assert len(changes) == 1, higher.name


def test_a_smoke_test_has_two_steps_where_epochs_were_asked_for(tmp_path: Path) -> None:
    asked = changed(find_recipe("mnist-shoefit-tanh").config, privacy={"steps": None, "epochs": 15.0})
    quick = quick_config(asked, tmp_path)
    assert (quick.privacy.steps, quick.privacy.epochs) == (2, None)


def test_a_smoke_test_keeps_model_optimizer_views_and_clipping(tmp_path: Path) -> None:
    for name in ("tiny-scaleresnet9-eps10", "cifar10-wrn16_4-eps8", "fashion-shoefit-adam-256"):
        whole = find_recipe(name).config
        quick = quick_config(whole, tmp_path)
        assert quick.model is not None
        assert whole.model is not None
        assert quick.model.name == whole.model.name
        assert {k: v for k, v in quick.model.options.items() if k != "image_size"} == whole.model.options
        assert quick.optimizer == whole.optimizer
        assert quick.averaging == whole.averaging
        assert (quick.views.flip, quick.views.rotation) == (whole.views.flip, whole.views.rotation)
        assert quick.views.count == min(2, whole.views.count)
        for part in ("clip_norm", "clipping", "unit_norm"):
            assert getattr(quick.privacy, part) == getattr(whole.privacy, part)
        assert (quick.privacy.steps, quick.privacy.expected_batch_size) == (2, 4)
        assert quick.name == f"{name}-quick"
        assert Path(quick.data.source).parent == tmp_path, "no real picture is touched"


def test_small_images_leave_instance_norm_more_than_one_position(tmp_path: Path) -> None:
    recipe = find_recipe("imagenette-scaleresnet50-eps7.5-instance")
    with np.load(quick_config(recipe.config, tmp_path).data.source) as arrays:
        quick_side = arrays["x_train"].shape[-1]
    cpu = recipe.at("cpu")
    assert "64 px" in recipe.reduction
    for config, side in ((cpu, cpu.data.image_size), (recipe.config, quick_side)):
        assert config.model is not None
        assert side is not None
        model = models.create(config.model.name, num_classes=10, in_channels=3, seed=0, **config.model.options)
        assert model(torch.zeros(1, 3, side, side)).shape == (1, 10), "one unit by itself, in training mode"


FAST = (
    "demo",
    "mnist-shoefit-relu",
    "fashion-shoefit-adam-1024-no-privacy",
    "fashion-scatter-linear-eps3",
    "mnist-doermann-eps1",
)


def run_quickly(recipe: Recipe, folder: Path) -> None:
    train(quick_config(recipe.config, folder / "made-up"), run=folder / "run", seed=0)
    found = verify(folder / "run")
    assert found.ok, found.problems
    assert not found.for_release


@pytest.mark.parametrize("name", FAST)
def test_some_recipes_run_as_smoke_tests(name: str, tmp_path: Path) -> None:
    run_quickly(find_recipe(name), tmp_path)


def unlike_each_other() -> list[Recipe]:
    """A recipe for every smoke test there is: budget, batch and steps play no part in them."""
    found: dict[str, Recipe] = {}
    for recipe in all_recipes():
        config = recipe.config
        transfer = config.transfer and config.transfer.model_copy(update={"weights": ""})
        privacy = config.privacy.model_dump(include={"enabled", "clip_norm", "clipping", "unit_norm"})
        parts = (config.data, config.model, config.views, config.optimizer, config.schedule.kind, config.averaging)
        found.setdefault(repr((*parts, transfer, privacy)), recipe)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", unlike_each_other(), ids=named)
def test_every_recipe_runs_as_a_smoke_test(recipe: Recipe, tmp_path: Path) -> None:
    run_quickly(recipe, tmp_path)


def test_train_quick_says_that_its_figures_mean_nothing_and_stamps_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = dpvision("train", "--recipe", "mnist-shoefit-tanh", "--quick", "--json")
    assert result.exit_code == 0, result.output
    assert "mean nothing" in result.stderr
    figures = json.loads(result.stdout)
    assert "mean nothing" in figures["smoke_test"]
    assert figures["for_release"] is False
    assert figures["run"] == "runs/mnist-shoefit-tanh-quick-1"


def test_scale_cpu_takes_the_reduced_version() -> None:
    from dpvision.cli.train_command import build_config

    name = "cifar10-scaleresnet9-eps3"
    config = build_config({}, recipe=name, scale="cpu")
    assert config == find_recipe(name).at("cpu")
    assert config.name == "cifar10-scaleresnet9-eps3-cpu"


@pytest.mark.parametrize(
    "arguments",
    [
        "train digits --target-epsilon 3 --quick",
        "train digits --target-epsilon 3 --scale cpu",
        "train --recipe demo --scale tiny",
        "train --recipe cifar10-wrn40_4-eps8 --scale cpu",
        "recipes nonsense",
    ],
)
def test_nonsense_is_one_line_and_nothing_is_written(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = dpvision(*arguments.split())
    assert result.exit_code == 2, result.output
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert not list(tmp_path.iterdir())


def test_a_misspelt_recipe_is_answered_with_close_ones() -> None:
    with pytest.raises(ArgumentError, match="cifar10-scaleresnet9-eps3"):
        find_recipe("cifar10-scaleresnet-eps3")


def test_one_recipe_is_shown_with_command_figures_and_differences() -> None:
    text = dpvision("recipes", "mnist-shoefit-tanh").stdout
    for part in ("dpvision train --recipe mnist-shoefit-tanh", "98.1 %", "98.28 ± 0.17 % (n = 4)", "differs: "):
        assert part in text
    assert "not run yet" in dpvision("recipes", "cifar10-wrn16_4-eps1").stdout


def test_all_recipes_are_listed_by_paper_a_line_each_and_as_json() -> None:
    listed = dpvision("recipes").stdout.splitlines()
    assert "ScaleNorm:" in listed
    assert len(listed) == len(all_recipes()) + len({recipe.source for recipe in all_recipes()})
    values = json.loads(dpvision("recipes", "--json").stdout)["recipes"]
    assert [value["name"] for value in values] == [recipe.name for recipe in all_recipes()]


def test_a_folder_among_the_datasets_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPVISION_DATA", str(tmp_path))
    config = find_recipe("imagenette-resnet9-eps3").config
    assert place_data(config) == config
    (tmp_path / "imagenette2-160").mkdir()
    assert place_data(config).data.source == str(tmp_path / "imagenette2-160")
    known = find_recipe("cifar10-resnet9-eps3").config
    assert place_data(known) == known


def made_up_cifar100(rows_a_class: int) -> object:
    labels = np.repeat(np.arange(100), rows_a_class)
    images = np.zeros((len(labels), 3, 2, 2), np.uint8)
    images[:, 0, 0, 0] = labels
    names = tuple(map(str, range(100)))
    return store_of_arrays(images=images, labels=labels, class_names=names, name="made up")


@pytest.mark.parametrize(("kind", "classes"), [("min10", 10), ("half50", 50)])
def test_parts_of_cifar100_have_random_classes_merged_evenly_and_are_the_same_for_everybody(
    kind: str, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made_up_cifar100(3)
    splits = type("Splits", (), {"train": store, "test": store})
    monkeypatch.setenv("DPVISION_DATA", str(tmp_path))
    monkeypatch.setattr(recipe_data, "load", lambda *_: splits)
    config = find_recipe(f"cifar100-shoefit-pretrain-{kind}").config
    path = Path(place_data(config).data.source)
    with np.load(path) as arrays:
        images, labels = arrays["x_train"], arrays["y_train"]
    assert len(set(images[:, 0, 0, 0])) == classes
    assert set(Counter(labels.tolist()).values()) == {3 * classes // 10}
    merged = {(int(image), int(label)) for image, label in zip(images[:, 0, 0, 0], labels, strict=True)}
    assert len(merged) == classes, "a class goes into one label only"
    assert config.privacy.num_units == 500 * classes
    before = path.read_bytes()
    path.unlink()
    assert Path(place_data(config).data.source).read_bytes() == before


def test_a_draw_of_classes_has_a_source_of_its_own_and_other_sources_are_none() -> None:
    assert recipe_data.subset_of("cifar100-min10.npz") == ("min10", 1)
    assert recipe_data.subset_of("cifar100-half50-draw7.npz") == ("half50", 7)
    for source in ("cifar100", "cifar100-min10-draw0.npz", "cifar100-max100.npz", "a/cifar100-min10.npz"):
        assert recipe_data.subset_of(source) is None
    assert [recipe_data.subset_source("min10", draw) for draw in (1, 3)] == [
        "cifar100-min10.npz",
        "cifar100-min10-draw3.npz",
    ]
    draws = [tuple(recipe_data.SUBSETS["min10"].chosen(draw)) for draw in (1, 2, 3)]
    assert len(set(draws)) == 3


@pytest.mark.parametrize("depth", smoothnets.RATIOS)
def test_networks_of_the_ratio_study_have_about_the_papers_size(depth: int) -> None:
    size = models.count_parameters("smoothnet", depth=float(depth), width=smoothnets.RATIOS[depth])
    assert size == pytest.approx(3_391_853, rel=0.05)


def test_smoothnets_are_scored_on_a_fifth_of_the_training_images_and_baselines_have_xavier_weights() -> None:
    for model in smoothnets.FIGURES:
        config = find_recipe(smoothnets.benchmark_name("cifar10", model)).config
        assert (config.data.validation, config.data.holdout_fraction) == (True, 0.2)
        assert config.privacy.num_units == 40_000
        assert config.model is not None
        usual = model in ("smoothnet", "resnet9")
        assert config.model.options.get("init") == (None if usual else "xavier_uniform")


@pytest.mark.parametrize(("dataset", "filters"), [("mnist", 15), ("fashion", 64)])
def test_the_capacity_curves_have_the_captions_noise(dataset: str, filters: int) -> None:
    privacy = find_recipe(f"{dataset}-shoefit-filters{filters}").config.privacy
    assert (privacy.noise_multiplier, privacy.clip_norm, privacy.expected_batch_size) == (1.1, 1.0, 100)
    assert privacy.steps == 40 * 600
    mechanism = Mechanism(num_units=60_000, expected_batch_size=100, clip_norm=1.0, noise_multiplier=1.1, steps=24_000)
    assert mechanism_guarantee(mechanism, delta=1e-5).epsilon == pytest.approx(1.123, abs=2e-3)  # "differs" says 1.13
