"""Public test pictures with what a model made of them, as one file of a release. No torch.

A picture may be given away only where whoever configured the run named it as public; ``training.examples`` sees to it.
"""

# Shapes: K examples, C channels, H × W pixels.

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import numpy as np
from numpy.typing import NDArray

from dpvision.checks import TamperError
from dpvision.runfolder.content import parse_object

EXAMPLES = "examples.safetensors"
Rank = Literal["best", "median", "worst"]
Pixels = NDArray[np.uint8]
_MOST_EXAMPLES = 32


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One picture: bytes, the class of every pixel as it is and as it was predicted, and how well they agree."""

    rank: Rank
    dice: float
    owner: str | None
    image_CHW: Pixels
    truth_HW: Pixels
    predicted_HW: Pixels


def examples_bytes(examples: Sequence[Example]) -> bytes:
    """The examples as the bytes of a safetensors file; equal examples give equal bytes."""
    from safetensors.numpy import save

    words = [{"rank": each.rank, "dice": each.dice, "owner": each.owner} for each in examples]
    arrays = {
        "images": np.stack([each.image_CHW for each in examples]),
        "truth": np.stack([each.truth_HW for each in examples]),
        "predicted": np.stack([each.predicted_HW for each in examples]),
    }
    return save(arrays, {"examples": json.dumps(words, allow_nan=False)})


def parse_examples(content: bytes, *, name: str) -> tuple[Example, ...]:
    """The examples of a file, whatever its bytes are; ``TamperError`` if they are none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(content)
        header = parse_object(content[8 : 8 + int.from_bytes(content[:8], "little")], name=name)
        words = json.loads(header["__metadata__"]["examples"])
        images, truth, predicted = (_bytes_of(arrays[key]) for key in ("images", "truth", "predicted"))
        _require(len(words) <= _MOST_EXAMPLES and len(images) == len(truth) == len(predicted) == len(words))
        _require(images.ndim == 4 and images.shape[1] in (1, 3) and 0 not in images.shape)
        _require(truth.shape == predicted.shape == (len(words), *images.shape[2:]))
        parts = zip(words, images, truth, predicted, strict=True)
        return tuple(_example(each, *pixels) for each, *pixels in parts)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise TamperError(f"{name} is not what dpvision writes: {error}.") from error


def _example(words: dict[str, Any], image: Pixels, truth: Pixels, predicted: Pixels) -> Example:
    rank, dice, owner = words["rank"], words["dice"], words["owner"]
    _require(rank in get_args(Rank) and type(dice) is float and 0 <= dice <= 1)
    _require(owner is None or isinstance(owner, str))
    return Example(rank=rank, dice=dice, owner=owner, image_CHW=image, truth_HW=truth, predicted_HW=predicted)


def _bytes_of(array: NDArray[Any]) -> Pixels:
    _require(array.dtype == np.uint8)
    return array


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("its examples don't fit together")
