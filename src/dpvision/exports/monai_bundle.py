"""The texts of a MONAI bundle: configs/inference.json, configs/metadata.json, docs/README.md.

The network is models/model.pt2, a graph of torch.export: a bundle runs without dpvision. It takes bytes 0..255 as
float32 and gives the probability of every class at every pixel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from dpvision.exports.plain_graph import PlainGraph

MODEL_FILE: Final = "models/model.pt2"
_SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
_MONAI_VERSION, _IGNITE_VERSION, _PILLOW_VERSION = "1.4.0", "0.4.11", "11.0.0"


@final
class BundleNetwork(nn.Module):
    """float32 images (N, C, H, W) of 0..255 → probabilities (N, K, H, W): one input, one output, as MONAI expects."""

    def __init__(self, graph: PlainGraph) -> None:
        super().__init__()
        self.network = graph

    def forward(self, image: Tensor) -> Tensor:
        """Probabilities of every class at every pixel."""
        return self.network(image)[0]


def bundle_texts(
    *, class_names: Sequence[str], image_shape: tuple[int, int, int], facts: Mapping[str, str]
) -> dict[str, str]:
    """Return the texts of a bundle, by path.

    Args:
        class_names: of the pixels, background first.
        image_shape: (channels, height, width) of the network's input.
        facts: what the export says of itself.
    """
    return {
        "configs/metadata.json": _json(_metadata(class_names, image_shape, facts)),
        "configs/inference.json": _json(_inference(len(class_names), image_shape)),
        "docs/README.md": _readme(facts),
    }


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=4) + "\n"


def _metadata(
    class_names: Sequence[str], image_shape: tuple[int, int, int], facts: Mapping[str, str]
) -> dict[str, Any]:
    channels, height, width = image_shape
    sides = {"spatial_shape": [height, width], "dtype": "float32", "is_patch_data": False}
    image = {"type": "image", "format": "magnitude", "modality": "n/a", "num_channels": channels, **sides}
    colours = ("grey",) if channels == 1 else ("red", "green", "blue")
    mask = {"type": "image", "format": "segmentation", "num_channels": len(class_names), **sides}
    return {
        "schema": _SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": "exported from a dpvision release"},
        "monai_version": _MONAI_VERSION,
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {"pytorch-ignite": _IGNITE_VERSION, "pillow": _PILLOW_VERSION},
        "name": f"{facts['model']} with differential privacy",
        "task": "segmentation",
        "description": f"Segmentation, trained with differential privacy: epsilon {facts['epsilon']}, "
        f"delta {facts['delta']}, {facts['adjacency']} of one {facts['privacy_unit']}.",
        "authors": "unknown",
        "copyright": "unknown: the owner of the model chooses its licence",
        "network_data_format": {
            "inputs": {"image": {**image, "value_range": [0, 255], "channel_def": _numbered(colours)}},
            "outputs": {"pred": {**mask, "value_range": [0, 1], "channel_def": _numbered(class_names)}},
        },
        "dpvision": dict(facts),
    }


def prepare_expression(image_shape: tuple[int, int, int]) -> str:
    """Return a Python expression: a function that prepares a Pillow image as ``dpvision.data.decode`` does.

    It needs ``np``, ``Image`` and ``ImageOps``: upright, 16 bits to 8, transparent parts over black, to size.
    """
    channels, height, width = image_shape
    grey = ".convert('L')" if channels == 1 else ""
    eight = "Image.fromarray(np.rint(np.asarray(i) / 65535 * 255).astype(np.uint8)) if i.mode.startswith('I') else i"
    black = "Image.alpha_composite(Image.new('RGBA', i.size, 'black'), i.convert('RGBA'))"
    fit = f"ImageOps.fit(i.convert('RGB'){grey}, ({width}, {height}), Image.Resampling.BILINEAR)"
    parts = ("ImageOps.exif_transpose(i)", eight, f"{black} if i.has_transparency_data else i", fit)
    whole = "i"
    for part in parts:
        whole = f"(lambda i: {part})({whole})"
    return f"lambda i: {whole}"


def _numbered(names: Sequence[str]) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(names)}


def _inference(num_classes: int, image_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Images of a folder, through the network, to masks; PNG by default."""
    channels, *_ = image_shape
    load = {"_target_": "LoadImaged", "keys": "image", "reader": "PILReader", "reverse_indexing": False}
    save = {"_target_": "SaveImaged", "keys": "pred", "output_dir": "@output_dir", "output_postfix": "mask"}
    channel_dim = "no_channel" if channels == 1 else -1
    return {
        "imports": [
            *("$import glob", "$import numpy as np", "$import torch"),
            *("$from PIL import Image", "$from PIL import ImageOps"),
        ],
        "bundle_root": ".",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/masks'",
        "datalist": "$sorted(glob.glob(@dataset_dir + '/*.png'))",
        "network_def": f"$torch.export.unflatten(torch.export.load(@bundle_root + '/{MODEL_FILE}'))",
        "network": "$@network_def.to(@device)",
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [
                {**load, "converter": f"${prepare_expression(image_shape)}"},
                {"_target_": "EnsureChannelFirstd", "keys": "image", "channel_dim": channel_dim},
                {"_target_": "EnsureTyped", "keys": "image", "dtype": "$torch.float32"},
            ],
        },
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': name} for name in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0},
        "inferer": {"_target_": "SimpleInferer"},
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
                # Pillow's writer takes width first.
                {"_target_": "Transposed", "keys": "pred", "indices": [0, 2, 1]},
                {
                    **save,
                    "output_ext": ".png",
                    "scale": 255 if num_classes == 2 else None,
                    "resample": False,
                    "separate_folder": False,
                },
            ],
        },
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
        },
        "run": ["$@evaluator.run()"],
    }


def _readme(facts: Mapping[str, str]) -> str:
    rows = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return (
        "# A segmentation model, trained with differential privacy\n\n"
        "Put images into `images/` and run, in this folder:\n\n"
        "```\npython -m monai.bundle run --config_file configs/inference.json\n```\n\n"
        "Masks are written to `masks/`, at the size of the network's input. Volumes are sets of slices: map the\n"
        "intensities of `window` below to 0..255 first, if there is one.\n\n"
        f"{rows}\n"
    )
