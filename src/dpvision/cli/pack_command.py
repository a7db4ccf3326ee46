"""``dpvision pack``: a source as a store of uint8 shards, for images that do not fit into memory."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from dpvision.cli.console import print_results, say
from dpvision.cli.flags import Given, Json

_READING = (
    *("data_dir", "image_size", "channels", "skip_bad", "file_column", "label_column", "split_column"),
    *("image_folder", "classes", "public_classes", "frames", "findings", "findings_columns", "mask_classes"),
    *("volume_axis", "window", "only_foreground", "unit_column", "unit_csv", "unit_folder_level", "unit_pattern"),
    "units",
)


def pack(
    source: Annotated[str, typer.Argument(help="Images, in any form that `dpvision train` reads.")],
    store: Annotated[Path, typer.Argument(help="The folder to write; an interrupted pack of it is continued.")],
    given: Annotated[Given, _READING],
    masks: Annotated[str | None, typer.Option(help="Masks of the images: pack for --task segmentation.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the whole store again, and compare every file with its SHA-256.")
    ] = False,
    json: Json = False,
) -> None:
    """Write images once, decoded and resized, into a store that training maps into memory.

    For images that do not fit into memory, and for images that are slow to decode. A run on the store is like a run on
    the source: units, classes, test part and declarations are packed too, so say here who owns which image.

    Example: dpvision pack ./scans scans.store --image-size 64

    Then: dpvision train scans.store --target-epsilon 3

    Owners: dpvision pack ./scans scans.store --unit-pattern '^(p\\d+)'
    """
    from dpvision.cli.train_command import build_config

    # The source is read as for a private run, whose labels must not decide which classes there are; nothing is spent.
    private = {"target_epsilon": 1.0}
    values: dict[str, Any] = {"privacy": private, "data": {**given.get("data", {}), "source": source}}
    if masks is not None:
        values["task"] = "segmentation"
        values["data"]["masks"] = masks
    config = build_config(values)
    from dpvision.cli.progress import TerminalProgress
    from dpvision.data.packing import check_packed
    from dpvision.data.packing import pack as pack_source
    from dpvision.data.splits import load_options
    from dpvision.training.prepare import choose_image_shape

    config, chosen = choose_image_shape(config)
    for choice in chosen:
        say(f"  {choice.setting} = {choice.value}  ({choice.reason})")
    with closing(TerminalProgress()) as progress:

        def show(what: str, done: int, total: int) -> None:
            progress.progressed(what, done=done, total=total)

        packed = pack_source(source, store, load_options(config), progress=show)
        files = check_packed(store, progress=show) if verify else None
    results: dict[str, Any] = {
        "store": str(packed.store),
        "train_rows": packed.train_rows,
        "test_rows": packed.test_rows,
        "image_shape": list(packed.image_shape),
        "classes": len(packed.class_names),
        "shards": packed.shards,
        "resumed_shards": packed.resumed,
        "skipped": packed.skipped,
        "complete_before": packed.complete,
        "verified_files": files,
    }
    channels, height, width = packed.image_shape
    lines = [
        f"{packed.train_rows:,} training and {packed.test_rows:,} test images of {channels}×{height}×{width} in "
        f"{packed.shards} shards, {len(packed.class_names)} classes",
    ]
    if packed.complete:
        lines.append("the store was complete before: nothing was written")
    elif packed.resumed:
        lines.append(f"{packed.resumed} shards were there from an earlier call")
    if packed.skipped:
        lines.append(f"{packed.skipped} images can't be read and were skipped")
    if files is not None:
        lines.append(f"verified: {files} files have the SHA-256 that was recorded")
    lines.append(f"train on it: dpvision train {packed.store} --target-epsilon 3")
    print_results(results, lines, json=json)
