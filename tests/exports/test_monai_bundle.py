"""The MONAI bundle: its layout, its network, and the same masks in MONAI where it is installed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from bright_model import bright_model
from dpvision.data.images import decode
from dpvision.errors import DPVisionError
from dpvision.exports import formats
from dpvision.exports.monai_bundle import prepare_expression
from dpvision.inference.load import ReleasedModel
from unusual_images import write_unusual_images

FACTS = {"model": "bright", "epsilon": "2.5", "delta": "1e-05", "adjacency": "add_remove", "privacy_unit": "patient"}


def bundle(released: ReleasedModel) -> dict[str, bytes]:
    files, difference = formats.converted(released, to="monai-bundle", facts=FACTS)
    assert difference < 1e-6
    return files


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return bundle(bright_model(size=(16, 24)))


def test_a_bundle_has_the_layout_of_monai(files: dict[str, bytes]) -> None:
    assert set(files) == {"configs/inference.json", "configs/metadata.json", "models/model.pt2", "docs/README.md"}
    metadata = json.loads(files["configs/metadata.json"])
    needed = {"version", "changelog", "monai_version", "pytorch_version", "numpy_version", "task", "description"}
    assert needed | {"authors", "copyright", "network_data_format", "schema"} <= set(metadata)
    form = metadata["network_data_format"]
    assert form["inputs"]["image"]["spatial_shape"] == [16, 24]
    assert form["outputs"]["pred"]["channel_def"] == {"0": "background", "1": "class 1"}
    assert metadata["dpvision"] == FACTS
    config = json.loads(files["configs/inference.json"])
    needed = {"bundle_root", "device", "dataset_dir", "dataset", "evaluator", "network_def", "inferer"}
    assert needed <= set(config)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export, about itself
def test_the_network_of_a_bundle_takes_float_bytes_and_any_batch(files: dict[str, bytes]) -> None:
    network = torch.export.unflatten(torch.export.load(io.BytesIO(files["models/model.pt2"]))).eval()
    for count in (1, 4):
        found = network(torch.full((count, 1, 16, 24), 200.0))
        assert found.shape == (count, 2, 16, 24)
        assert torch.allclose(found.sum(1), torch.ones(count, 16, 24))
        assert (found[:, 1] > 0.5).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_bundle_prepares_every_kind_of_image_as_predict_does(tmp_path: Path, channels: int) -> None:
    made = eval(prepare_expression((channels, 12, 9)), {"np": np, "Image": Image, "ImageOps": ImageOps})  # noqa: S307
    for path in write_unusual_images(tmp_path):
        with Image.open(path) as image:
            found = np.asarray(made(image)).reshape(12, 9, channels).transpose(2, 0, 1)
        np.testing.assert_array_equal(found, decode(path, image_shape=(channels, 12, 9)), err_msg=path.name)


def test_a_bundle_appears_as_a_whole_or_not_at_all(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = formats.write_atomically

    def full(path: Path, content: bytes) -> None:
        if path.suffix == ".md":
            raise OSError(28, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(formats, "write_atomically", full)
        with pytest.raises(DPVisionError, match="No space left"):
            formats._place_files(tmp_path / "bundle", files)
    assert list(tmp_path.iterdir()) == []
    formats._place_files(tmp_path / "bundle", files)
    found = {path.relative_to(tmp_path / "bundle").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == set(files)
    assert (tmp_path / "bundle").stat().st_mode & 0o777 == 0o755


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("channels", [1, 3])
def test_monai_runs_a_bundle_and_finds_the_same_masks(tmp_path: Path, channels: int) -> None:
    parser_module: Any = pytest.importorskip("monai.bundle")
    released = bright_model(size=(16, 24))
    if channels == 3:
        released = ReleasedModel(**{**vars(released), "image_shape": (3, 16, 24)})
    for name, content in bundle(released).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "images").mkdir()
    noise = np.random.default_rng(0).integers(0, 4, size=(32, 48, 3), dtype=np.uint8) * 64
    pixels = noise if channels == 3 else noise[..., 0]
    Image.fromarray(pixels).save(tmp_path / "images" / "scan.png")
    files = {
        "meta_file": str(tmp_path / "configs/metadata.json"),
        "config_file": str(tmp_path / "configs/inference.json"),
    }
    parser_module.verify_net_in_out("network_def", device="cpu", bundle_root=str(tmp_path), **files)
    parser = parser_module.ConfigParser()
    parser.read_config(files["config_file"])
    parser["bundle_root"] = str(tmp_path)
    item = parser.get_parsed_content("dataset")[0]
    network = parser.get_parsed_content("network_def")
    item["pred"] = parser.get_parsed_content("inferer")(item["image"][None], network)[0]
    parser.get_parsed_content("postprocessing")(item)
    (written,) = (tmp_path / "masks").iterdir()
    Image.fromarray(pixels).resize((24, 16), Image.Resampling.BILINEAR).save(tmp_path / "small.png")
    expected = released.predict(tmp_path / "small.png").masks[0]
    assert np.array_equal(np.asarray(Image.open(written)), expected * 255)
    assert 0 < expected.mean() < 1
