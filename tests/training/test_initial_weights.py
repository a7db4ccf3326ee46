"""Weights from elsewhere: read safely, fitted whole, trained in part, and declared."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats
from torch import Tensor, nn

import dpvision.privacy.private_step as step_module
import dpvision.training.trainer as loop_module
from dpvision import models
from dpvision.config import RunConfig, parse_config
from dpvision.data import Features, kept_features
from dpvision.errors import ArgumentError, DataError, DPVisionError, TamperError
from dpvision.models import FrozenBatchNorm
from dpvision.models.efficientnet import efficientnet_lite0
from dpvision.release.verify import verify
from dpvision.storage.run_folder import RunFolder
from dpvision.training import resume_training, train
from dpvision.training.callbacks import RunCallback
from dpvision.training.initial_weights import fit, read_weights
from dpvision.training.pretrained import KNOWN_WEIGHTS
from dpvision.training.stages import blocks_of, head_of, trained_names
from dpvision.training.start import start_run
from tiny_runs import SIDE, interrupt_run, tiny_config, write_images

CNN: dict[str, Any] = {"name": "shoefit_cnn", "options": {"image_size": SIDE, "filters": 3}}
HEAD = {"9.weight", "9.bias"}


def cnn(seed: int = 0) -> nn.Module:
    return models.create("shoefit_cnn", num_classes=3, in_channels=1, seed=seed, image_size=SIDE, filters=3)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures.npz")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file(cnn(seed=5).state_dict(), tmp_path / "public.safetensors")
    return tmp_path / "public.safetensors"


def transfer_config(data: Path, weights: Path | str, **changes: Any) -> RunConfig:
    values = tiny_config(data, model=CNN, **changes.pop("sections", {})).model_dump()
    return parse_config({**values, "transfer": {"weights": str(weights), "source": "public pictures", **changes}})


def released(run: Path) -> dict[str, Tensor]:
    return RunFolder.open(run).load_weights()


def declared(certificate: dict[str, Any]) -> dict[str, str]:
    return {item["what"]: item["how"] for item in certificate["declared"]}


# ---- reading


@pytest.mark.parametrize("kind", ["safetensors", "pth", "pt", "npz"])
def test_weights_are_read_from_the_usual_files(tmp_path: Path, kind: str) -> None:
    state, path = cnn().state_dict(), tmp_path / f"weights.{kind}"
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "npz":
        np.savez(path, **{name: value.numpy() for name, value in state.items()})
    else:
        torch.save({"state_dict": state, "epoch": 3} if kind == "pt" else state, path)
    found, content = read_weights(path)
    assert content == path.read_bytes()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())


class Hostile:
    """What a pickle does when it is loaded in full."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (Path("executed"), "by a weight file")


@pytest.mark.parametrize("kind", ["pth", "npz"])
def test_nothing_in_a_weight_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"hostile.{kind}"
    if kind == "npz":
        np.savez(path, weight=np.array([Hostile()], dtype=object))
    else:
        torch.save({"weight": Hostile()}, path)
    with pytest.raises(DataError):
        read_weights(path)
    assert not Path("executed").exists()


@pytest.mark.parametrize("kind", ["safetensors", "pth", "legacy.pth", "npz", "txt"])
def test_damaged_weight_files_are_one_clear_error(tmp_path: Path, kind: str) -> None:
    whole = tmp_path / f"whole.{kind}"
    state = {"weight": torch.arange(4.0)}
    match kind:
        case "safetensors":
            save_file(state, whole)
        case "npz":
            np.savez(whole, weight=np.arange(4.0))
        case _:
            torch.save(state, whole, _use_new_zipfile_serialization=kind != "legacy.pth")
    generator, content = np.random.default_rng(0), whole.read_bytes()
    for _ in range(60):
        damaged = bytearray(content[: generator.integers(1, len(content) + 1)])
        damaged[generator.integers(len(damaged))] ^= 1 << int(generator.integers(8))
        whole.write_bytes(damaged)
        with contextlib.suppress(DPVisionError):  # some flips hit numbers only
            read_weights(whole)
    for junk in (b"", pickle.dumps([1, 2]), b"{}"):
        whole.write_bytes(junk)
        with pytest.raises(DPVisionError):
            read_weights(whole)


def test_arrays_keep_their_shape_and_a_name_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    np.savez(path, count=np.array(3), weight=np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    found, _ = read_weights(path)
    assert found["count"].shape == ()
    assert torch.equal(found["weight"], torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("count.npy", archive.read("count.npy"))
    with pytest.raises(DataError, match="two of its arrays have one name"):
        read_weights(path)


@pytest.mark.parametrize("kind", ["npz", "pth"])
def test_a_file_that_would_fill_the_memory_is_refused_before_it_is_unpacked(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"bomb.{kind}"
    np.savez_compressed(tmp_path / "bomb.npz", weight=np.zeros(10**6))
    (tmp_path / "bomb.npz").replace(path)
    with pytest.raises(DataError, match="would unpack to"):
        read_weights(path)


def test_an_array_that_promises_more_than_there_is_is_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.save(content, np.zeros(8))
    lying = content.getvalue().replace(b"(8,)", b"(9,)")
    with zipfile.ZipFile(tmp_path / "lying.npz", "w") as archive:
        archive.writestr("weight.npy", lying)
    with pytest.raises(DataError, match="its header promises"):
        read_weights(tmp_path / "lying.npz")


def test_weights_beyond_the_memory_are_one_clear_error(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(content: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr("dpvision.training.initial_weights.load_safetensors", full)
    with pytest.raises(DataError, match="does not fit into memory"):
        read_weights(weights)


# ---- fitting


def test_two_tensors_that_would_get_one_name_are_refused() -> None:
    model, state = cnn(seed=1), dict(cnn(seed=2).state_dict())
    with pytest.raises(ArgumentError, match=r"there twice, once renamed: 0\.weight"):
        fit(model, {**state, "old.0.weight": state["0.weight"] + 1}, rename={"old.": ""})


def test_weights_go_in_by_name_and_the_head_keeps_its_own() -> None:
    model, source = cnn(seed=1), cnn(seed=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit(model, {f"net.{name}": value for name, value in source.state_dict().items()}, rename={"net.": ""})
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] if name in HEAD else source.state_dict()[name]), name


def test_all_that_does_not_fit_is_named_in_one_line_and_nothing_is_copied() -> None:
    model, state = cnn(seed=1), dict(cnn(seed=2).state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state["extra.weight"] = state.pop("0.weight")
    state["3.bias"] = torch.zeros(7)
    with pytest.raises(ArgumentError) as caught:
        fit(model, state, rename={})
    text = str(caught.value)
    assert "missing: 0.weight" in text
    assert "unexpected: extra.weight" in text
    assert "3.bias (7 in the file, 3 in the model)" in text
    assert "\n" not in text
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("change", "problem"), [("drop", "missing"), ("add", "unexpected"), ("bend", "another shape")])
def test_each_misfit_alone_is_refused(change: str, problem: str) -> None:
    state = dict(cnn(seed=2).state_dict())
    bias = state.pop("3.bias")
    state |= {"drop": {}, "add": {"3.bias": bias, "3.gain": bias}, "bend": {"3.bias": bias[:1]}}[change]
    with pytest.raises(ArgumentError, match=problem):
        fit(cnn(seed=1), state, rename={})


def trained_batch_norms(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None
                tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model.eval()


def test_a_frozen_batch_norm_is_batch_norm_in_evaluation_and_a_group_norm_takes_its_weights() -> None:
    public = trained_batch_norms(efficientnet_lite0(num_classes=4, in_channels=3, norm="batch"))
    frozen = efficientnet_lite0(num_classes=4, in_channels=3)
    fit(frozen, public.state_dict(), rename={}, head=True)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(frozen.train()(x), public(x))
    assert not any(isinstance(owner, FrozenBatchNorm) and list(owner.parameters()) for owner in frozen.modules())
    grouped = efficientnet_lite0(num_classes=4, in_channels=3, norm="group")
    fit(grouped, public.state_dict(), rename={})
    assert torch.equal(grouped.state_dict()["bn0.weight"], public.state_dict()["bn0.weight"])
    assert "bn0.running_mean" not in grouped.state_dict()


@pytest.mark.parametrize("name", list(KNOWN_WEIGHTS))
def test_published_weights_fit_their_model_whole(name: str) -> None:
    known = KNOWN_WEIGHTS[name]
    try:
        path = known.find(None)
    except DataError:
        pytest.skip(f"{name} is not on this machine")
    tensors, _ = read_weights(path)
    model = models.create(known.model, seed=0)
    fit(model, tensors, rename=known.rename)
    first = next(iter(tensors))
    assert torch.equal(next(iter(model.parameters())), tensors[first])


def test_efficientnet_lite_has_the_published_number_of_parameters() -> None:
    model = efficientnet_lite0(num_classes=1000, in_channels=3, norm="batch")
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_652_008


def test_a_model_can_resize_its_pictures() -> None:
    model = models.create("vgg16_conv3", seed=0, resize_to=16).eval()
    assert model(torch.randn(2, 3, 9, 11)).shape == (2, 10)
    with pytest.raises(ArgumentError, match="resize_to"):
        models.create("vgg16_conv3", resize_to=-1)


# ---- what learns


def test_the_head_of_every_model_gives_one_score_a_class() -> None:
    for entry in models.catalogue():
        if entry.family in ("segmentation", "nfnet"):
            continue
        with torch.device("meta"):
            model = entry.build(num_classes=7, in_channels=3)
        layer = model.get_submodule(head_of(model))
        assert getattr(layer, "out_features", getattr(layer, "out_channels", None)) == 7, entry.name


def test_the_last_stages_are_counted_from_the_head() -> None:
    model = models.create("resnet9", seed=0)
    assert blocks_of(model)[-3:] == ["conv4", "res2", "classifier"]
    names = trained_names(model, "last", stages=3)
    assert {name.partition(".")[0] for name in names} == {"conv4", "res2", "classifier"}
    assert trained_names(model, "last", stages=1) == trained_names(model, "head")
    assert trained_names(model, "all") == {name for name, _ in model.named_parameters()}
    with pytest.raises(ArgumentError, match="stages must be 1 to 7"):
        trained_names(model, "last", stages=8)
    lite = efficientnet_lite0(num_classes=2, in_channels=3)
    assert blocks_of(lite)[-3:] == ["blocks.15", "conv_head", "fc"]


# ---- runs


class Recorded(RunCallback):
    """Which parameters got noise in which step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noisy: dict[int, set[str]] = {}
        original = step_module.noisy_mean

        def watched(clipped: Any, *arguments: Any, step: int, **more: Any) -> Any:
            self.noisy[step] = set(clipped.gradients)
            return original(clipped, *arguments, step=step, **more)

        monkeypatch.setattr(step_module, "noisy_mean", watched)


def test_a_private_head_on_public_weights(
    tmp_path: Path, pictures: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    result = train(transfer_config(pictures, weights, licence="MIT"), run=tmp_path / "run")
    assert all(names == HEAD for names in recorded.noisy.values())
    found, given = released(tmp_path / "run"), cnn(seed=5).state_dict()
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given.keys() - HEAD)
    assert not torch.equal(found["9.weight"], given["9.weight"])
    assert result.certificate["for_release"]
    assert verify(tmp_path / "run").ok
    words = declared(result.certificate)
    sha = json.loads((tmp_path / "run" / "release" / "config.json").read_text())["transfer"]["sha256"]
    assert all(
        part in words["first weights"] for part in ("public.safetensors", sha, "public pictures", "MIT", "public,")
    )
    assert "head alone" in words["what learns"]
    for path in (tmp_path / "run" / "release").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name


def test_the_last_stages_learn_and_the_others_stay(tmp_path: Path, pictures: Path, weights: Path) -> None:
    train(transfer_config(pictures, weights, trained="last", stages=2), run=tmp_path / "run")
    found, given = released(tmp_path / "run"), cnn(seed=5).state_dict()
    moved = {name for name in given if not torch.equal(found[name], given[name])}
    assert moved == {"7.weight", "7.bias", *HEAD}


@pytest.mark.parametrize("after", [4, 5, 6])
def test_the_head_first_then_all_and_an_interruption_changes_nothing(
    tmp_path: Path, pictures: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """A checkpoint after every step: before the change of phase, right at it, and after it."""
    recorded = Recorded(monkeypatch)
    config = transfer_config(
        pictures, weights, trained="head_then_all", head_steps=5, sections={"checkpoint_every": 1, "evaluations": 1}
    )
    train(config, run=tmp_path / "whole", seed=3)
    everything = set(cnn().state_dict())
    assert [recorded.noisy[step] for step in range(12)] == [HEAD] * 5 + [everything] * 7
    interrupt_run(tmp_path / "cut", config, after=after)
    weights.unlink()  # a run carries its weights with it
    resume_training(tmp_path / "cut")
    names = ("weights.safetensors", "ledger.jsonl")
    for name in names:
        whole, cut = ((tmp_path / run / "release" / name).read_bytes() for run in ("whole", "cut"))
        assert whole == cut


def test_a_frozen_weight_that_moves_is_found(tmp_path: Path, pictures: Path, weights: Path) -> None:
    session, _ = start_run(transfer_config(pictures, weights), tmp_path / "run", seed=3, device="cpu")
    session.model.get_parameter("0.weight").data.add_(1.0)
    with session.folder, pytest.raises(DPVisionError, match=r"moved by other means than an optimizer step: 0\.weight"):
        loop_module.take_step(session)


def test_a_weight_that_moves_between_two_phases_is_found(tmp_path: Path, pictures: Path, weights: Path) -> None:
    config = transfer_config(pictures, weights, trained="head_then_all", head_steps=1)
    session, _ = start_run(config, tmp_path / "run", seed=3, device="cpu")
    with session.folder:
        loop_module.take_step(session)
        session.model.get_parameter("0.weight").data.add_(1.0)
        with pytest.raises(DPVisionError, match=r"moved by other means"):
            loop_module.take_step(session)


def test_the_engine_decides_how_it_computes_both_phases_before_the_first_step(
    tmp_path: Path, pictures: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided at the change, it would be decided at weights that a resumed run does not have then."""
    config = transfer_config(pictures, weights, trained="head_then_all", head_steps=2)
    values = {**config.model_dump(), "cache_features": "off"}
    session, _ = start_run(parse_config(values), tmp_path / "run", seed=3, device="cpu")
    monkeypatch.setattr("dpvision.gradients.plan._make_plan", None)  # not called again
    with session.folder:
        for _ in range(4):
            loop_module.take_step(session)


def test_a_head_has_settings_of_its_own_where_they_are_left_open(tmp_path: Path, pictures: Path, weights: Path) -> None:
    values = transfer_config(pictures, weights).model_dump()
    values["privacy"]["clip_norm"] = values["optimizer"] = None
    result = train(parse_config(values), run=tmp_path / "run", seed=3)
    chosen = json.loads((tmp_path / "run" / "release" / "config.json").read_text())["optimizer"]
    assert chosen["name"] == "sgd"
    assert chosen["learning_rate"] > 0
    assert result.certificate["mechanism"]["clip_norm"] > 0


def test_weights_that_changed_since_they_were_named_are_refused(tmp_path: Path, pictures: Path, weights: Path) -> None:
    with pytest.raises(TamperError, match="not the file that was meant"):
        train(transfer_config(pictures, weights, sha256="0" * 64), run=tmp_path / "run")


def test_other_weights_are_another_configuration(tmp_path: Path, pictures: Path, weights: Path) -> None:
    first = train(transfer_config(pictures, weights), run=tmp_path / "a", seed=3)
    save_file(cnn(seed=6).state_dict(), weights)
    second = train(transfer_config(pictures, weights), run=tmp_path / "b", seed=3)
    assert first.certificate["config_sha256"] != second.certificate["config_sha256"]
    binding = [json.loads((tmp_path / run / "private" / "key.json").read_text())["bindings"][-1] for run in "ab"]
    assert binding[0]["config"] != binding[1]["config"]


# ---- earlier runs


def earlier(tmp_path: Path, pictures: Path, *, private: bool, seed: int | None = None) -> dict[str, Any]:
    config = tiny_config(pictures, model=CNN, privacy={"enabled": private})
    return train(config, run=tmp_path / "earlier", seed=seed).certificate


def test_an_earlier_private_run_composes_and_the_certificate_says_how(tmp_path: Path, pictures: Path) -> None:
    before = earlier(tmp_path, pictures, private=True)
    result = train(transfer_config(pictures, tmp_path / "earlier", source=None), run=tmp_path / "run")
    found, given = released(tmp_path / "run"), released(tmp_path / "earlier")
    assert all(torch.equal(found[name], given[name]) for name in given.keys() - HEAD)
    words = declared(result.certificate)
    assert before["weights_sha256"] in words["first weights"]
    assert "charged there, not here" in words["first weights"]
    both = words["first weights and this run together"]
    total = float(both.partition("epsilon at most ")[2].partition(" ")[0])
    # The run took its whole plan, so its epsilon is the planned one; the sum is rounded up to four digits.
    assert total == pytest.approx(before["epsilon"] + result.certificate["epsilon"], rel=1e-3)
    assert total >= before["epsilon"] + result.certificate["epsilon"]
    assert "0.002" in both
    assert result.certificate["epsilon"] == pytest.approx(before["epsilon"], rel=1e-6)
    assert result.certificate["for_release"]
    assert verify(tmp_path / "run").ok
    again = train(transfer_config(pictures, tmp_path / "run", source=None), run=tmp_path / "third")
    assert before["weights_sha256"] in declared(again.certificate)["first weights, runs back: 1"]


def test_an_earlier_run_that_is_not_for_release_makes_this_one_so_too(tmp_path: Path, pictures: Path) -> None:
    earlier(tmp_path, pictures, private=True, seed=4)
    result = train(transfer_config(pictures, tmp_path / "earlier"), run=tmp_path / "run")
    assert not result.certificate["for_release"]
    assert any("hand-seeded" in stamp for stamp in result.certificate["stamps"])


def test_weights_trained_on_the_same_data_without_privacy_are_not_for_release(tmp_path: Path, pictures: Path) -> None:
    earlier(tmp_path, pictures, private=False)
    same = train(transfer_config(pictures, tmp_path / "earlier"), run=tmp_path / "same")
    assert any("data of this very run" in stamp for stamp in same.certificate["stamps"])
    elsewhere = write_images(tmp_path / "others.npz")
    other = train(transfer_config(elsewhere, tmp_path / "earlier"), run=tmp_path / "other")
    assert other.certificate["for_release"]
    assert "declared public" in declared(other.certificate)["first weights"]


def test_mean_var_draws_each_layer_with_the_moments_of_the_earlier_run(tmp_path: Path, pictures: Path) -> None:
    earlier(tmp_path, pictures, private=True)
    given = released(tmp_path / "earlier")
    still = {"privacy": {"noise_multiplier": 5.0}, "optimizer": {"learning_rate": 1e-12}}
    config = transfer_config(
        pictures, tmp_path / "earlier", trained="all", initialisation="mean_var", sections=still, source=None
    )
    result = train(config, run=tmp_path / "run", seed=3)
    found = released(tmp_path / "run")
    for name in ("0.weight", "7.weight"):
        size = found[name].numel()
        assert not torch.equal(found[name], given[name])
        # Mean and variance of so many normals: each is farther off with a chance of 1e-10.
        shift = (found[name].mean() - given[name].mean()) / given[name].std() * size**0.5
        assert abs(float(shift)) < stats.norm.isf(5e-11)
        squares = float(found[name].var() / given[name].var()) * (size - 1)
        assert stats.chi2.ppf(5e-11, size - 1) < squares < stats.chi2.isf(5e-11, size - 1)
    words = declared(result.certificate)
    assert "mean and variance" in words["what learns"]
    assert "first weights and this run together" in words


def test_a_numbered_mean_var_draw_is_the_same_in_every_run(tmp_path: Path, pictures: Path) -> None:
    earlier(tmp_path, pictures, private=False)
    still = {"privacy": {"enabled": False}, "optimizer": {"learning_rate": 1e-12}}
    found = []
    for number, (seed, draw) in enumerate([(1, 3), (2, 3), (1, 4)]):
        config = transfer_config(
            pictures,
            tmp_path / "earlier",
            trained="all",
            initialisation="mean_var",
            draw=draw,
            sections=still,
            source=None,
        )
        train(config, run=tmp_path / str(number), seed=seed)
        found.append(released(tmp_path / str(number))["0.weight"])
    assert torch.allclose(found[0], found[1], atol=1e-6)  # after twelve steps of rate 1e-12
    assert not torch.allclose(found[0], found[2], atol=1e-2)


# ---- wrong configurations


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"trained": "last"}, "stages"),
        ({"stages": 2}, "stages"),
        ({"trained": "head_then_all"}, "head_steps"),
        ({"head_steps": 2}, "head_steps"),
        ({"initialisation": "mean_var"}, "trained=all"),
        ({"draw": 3}, "initialisation=mean_var"),
        ({"trained": "head_then_all", "head_steps": 12}, "head_steps must be below steps=12"),
        ({"source": None}, "source must say"),
        ({"weights": "nowhere.safetensors"}, "weights must be a file"),
        ({"trained": "last", "stages": 9}, "stages must be 1 to 4"),
    ],
)
def test_a_wrong_transfer_is_refused_before_anything_is_written(
    tmp_path: Path, pictures: Path, weights: Path, wrong: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DPVisionError, match=reason):
        train(transfer_config(pictures, wrong.pop("weights", weights), **wrong), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- features on disk


@pytest.mark.parametrize("kind", ["listed by others", "written by others", "a link"])
def test_features_are_neither_kept_in_nor_taken_from_a_folder_that_is_open_to_others(tmp_path: Path, kind: str) -> None:
    def compute() -> Features:
        return Features(torch.arange(6.0).reshape(3, 1, 2))

    kept_features(tmp_path / "f", "key", compute)
    folder = tmp_path / "f"
    if kind == "a link":
        folder = tmp_path / "link"
        folder.symlink_to(tmp_path / "f")
    else:
        folder.chmod(0o755 if kind == "listed by others" else 0o722)
    for key in ("key", "another"):
        with pytest.raises(DataError, match="closed to others"):
            kept_features(folder, key, compute)
    assert len(list((tmp_path / "f").iterdir())) == 1
