"""The parts of the page for a model that gives every pixel a class: figures, patients, and pictures with outlines."""

from __future__ import annotations

from itertools import groupby

from dpvision.release.report_bars import Measured, bars_of
from dpvision.release.report_blocks import card, paragraph
from dpvision.release.report_facts import Overlaps, RunFacts, pictures_are_public
from dpvision.release.report_markup import Markup, element, embedded_png, join
from dpvision.release.report_overlays import overlay_png
from dpvision.release.report_words import percent, sentence
from dpvision.storage.run_folder import Example

_NOT_PUBLIC = (
    "No picture is shown. The figures above were measured on pictures that were held out of the private data, or came "
    "with it, and nobody has said that the pictures themselves may be seen. Name public ones with --test and "
    "--test-masks when training."
)
_PLURALS = {"class": "classes", "patient": "patients"}
_UNFINISHED = "No picture is shown: the run has not stored any."


def overlap_rows(found: Overlaps, *, loss: float | None) -> list[tuple[str, str]]:
    """Dice and what goes with it, as names and values."""
    shares = (
        ("Dice, mean over pictures", found.dice),
        ("Dice, mean over patients", found.dice_per_patient),
        ("IoU, mean over pictures", found.iou),
        ("IoU, mean over patients", found.iou_per_patient),
        ("Pixels classified right", found.pixel_accuracy),
        ("One mask for all, Dice", found.baseline_dice),
        ("One mask for all, patients", found.baseline_dice_per_patient),
    )
    rows = [(name, percent(share)) for name, share in shares if share is not None]
    return rows if loss is None else [*rows, ("Loss", f"{loss:.4f}")]


def examples(run: RunFacts) -> Markup | None:
    """Prediction and truth on public pictures: the best, the middle and the worst."""
    if run.score_name != "Dice":
        return None
    if not run.examples:
        reason = _UNFINISHED if pictures_are_public(run.certificate) else _NOT_PUBLIC
        return card("Prediction and truth", paragraph(reason))
    shown = [
        element(
            "div",
            element("h3", f"{sentence(rank)} by Dice"),
            element("div", *map(_figure, group), class_="examples"),
            class_="after",
        )
        for rank, group in groupby(run.examples, key=lambda example: example.rank)
    ]
    return card(
        "Prediction and truth",
        paragraph(
            "Public test pictures, chosen by their Dice among those that have something to find. The worst deserve "
            "the longest look: an average does not tell how a model fails."
        ),
        _legend(),
        *shown,
    )


def bars(run: RunFacts) -> Markup | None:
    """Each class and each patient by itself, worst first."""
    found = None if run.final is None else run.final.overlaps
    if found is None:
        return None
    classes = [Measured(name=name, share=each.dice) for name, each in found.per_class.items()]
    people = [Measured(name=name, share=dice) for name, dice in (found.per_patient or {}).items()]
    cards = [
        _bars("class", classes if len(classes) > 1 else [], overall=found.dice, baseline=None),
        _bars("patient", people, overall=found.dice_per_patient, baseline=found.baseline_dice_per_patient),
    ]
    return join(*cards)


def _bars(what: str, rows: list[Measured], *, overall: float | None, baseline: float | None) -> Markup | None:
    if not rows or overall is None:
        return None
    ordered = sorted(rows, key=lambda row: (row.share, row.name))
    note = "Dashed: the mean."
    if baseline is not None:
        note += (
            " Dotted: the best single mask given as an answer to every picture, chosen on these very pictures; a model "
            "must do clearly better. A patient's Dice takes all of their pixels together."
        )
    return card(
        f"Dice of each {what}",
        bars_of(ordered, overall=overall, baseline=baseline, what=_PLURALS[what]),
        paragraph(note, class_="note after"),
    )


def _legend() -> Markup:
    return element(
        "p",
        element("span", element("span", class_="swatch truth"), "truth: the mask that came with the picture"),
        " ",
        element("span", element("span", class_="swatch found"), "prediction of the released model"),
        class_="legend",
    )


def _figure(example: Example) -> Markup:
    of = "" if example.owner is None else f" · patient {example.owner}"
    alt = f"Test picture with two outlines, truth and prediction. Dice {percent(example.dice)}{of}."
    return element(
        "figure",
        embedded_png(overlay_png(example), alt=alt),
        element("figcaption", element("b", f"Dice {percent(example.dice)}"), of),
    )
