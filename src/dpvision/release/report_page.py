"""One self-contained page about a run: loads nothing, runs nothing, and is made from public files alone."""

from __future__ import annotations

from pathlib import Path

from dpvision.errors import DataError
from dpvision.release import report_masks, report_sections, report_words
from dpvision.release.report_blocks import equation, power
from dpvision.release.report_facts import RunFacts, is_private, read_run, reasons_against_release
from dpvision.release.report_markup import Markup, document, element, join
from dpvision.release.report_style import STYLE
from dpvision.storage.files import disk_errors, write_atomically
from dpvision.storage.run_folder import REPORT, RunFolder


def write_report(run: Path, *, output: Path | None = None) -> Path:
    """Write ``release/report.html`` of a run folder, with its manifest, or ``output`` instead; return its path.

    Guarantee: made of release/certificate.json, metrics.json and config.json only, and of pictures that the certificate
    declares public. The same files give the same bytes.
    """
    page = render(read_run(run)).encode()
    if output is not None:
        with disk_errors(f"write {output}"):
            write_atomically(output, page)
        return output
    if not (run / "private").is_dir():
        raise DataError(f"{run} is a release without its private/ folder, so it is left as it is. Give --output.")
    with RunFolder.open(run) as folder:
        folder.add_to_release(REPORT, page)
        return folder.release / REPORT


def render(run: RunFacts) -> str:
    """The page as text."""
    certificate = run.certificate
    body = element(
        "main",
        report_sections.stamp(certificate),
        _hero(run),
        report_sections.guarantee(certificate),
        report_sections.score(run),
        report_masks.examples(run),
        report_masks.bars(run),
        report_sections.classes(run.final, private=is_private(certificate)),
        report_sections.charged(certificate),
        element("div", report_sections.declared(certificate), report_sections.not_covered(certificate), class_="pair"),
        element(
            "div", report_sections.mechanism(certificate), report_sections.verification(certificate), class_="pair"
        ),
        report_sections.background(run),
        element(
            "footer",
            "Written by dpvision from the public files of this run. Nothing on this page is loaded from "
            "elsewhere and no private picture was read to make it.",
        ),
    )
    return document(title=_title(run), style=STYLE, body=body)


def _title(run: RunFacts) -> str:
    mark = "NOT FOR RELEASE: " if reasons_against_release(run.certificate) else ""
    return f"{mark}{_name(run)} – privacy report"


def _name(run: RunFacts) -> str:
    name = (run.config or {}).get("name")
    return name if isinstance(name, str) and name else run.name


def _hero(run: RunFacts) -> Markup:
    bad = bool(reasons_against_release(run.certificate))
    return element(
        "section",
        element(
            "div",
            element("span", element("b", "dpvision"), " privacy report for ", element("b", _name(run))),
            element("span", "not for release" if bad else "for release", class_=f"pill {'no' if bad else 'yes'}"),
            class_="eyebrow",
        ),
        element("h1", *_headline(run)),
        element("p", _lead(run), class_="lead"),
        element("div", *_tiles(run), class_="tiles"),
        class_="card hero",
    )


def _headline(run: RunFacts) -> list[str | Markup]:
    certificate = run.certificate
    final = run.final
    score = f"{report_words.percent(final.score, of=final.pictures)} {run.score_name}" if final else None
    if certificate.epsilon is None or certificate.delta is None:
        return [score or "A model", " ", element("span", "without privacy", class_="at")]
    pair = [
        equation("ε", join(report_words.epsilon_text(certificate.epsilon), ",")),
        " ",
        equation("δ", power(certificate.delta)),
    ]
    return pair if score is None else [score, " ", element("span", "at", class_="at"), " ", *pair]


def _lead(run: RunFacts) -> str:
    certificate = run.certificate
    model, source = _setting(run, "model", "name"), _setting(run, "data", "source")
    what = "An image model" if model is None else f"An image model ({model})"
    of = "" if source is None else f" on {Path(source).name or source}"
    if not is_private(certificate):
        return f"{what}, trained{of} without any protection of its training data."
    if reasons_against_release(certificate):
        return f"{what}, trained{of} with differential privacy, but not in a way that may be relied on: see above."
    unit = report_words.the_unit(certificate.privacy_unit)
    return f"{what}, trained{of} with differential privacy: what it can reveal about any one {unit} is limited."


def _tiles(run: RunFacts) -> list[Markup]:
    certificate = run.certificate
    if run.final is None:
        tiles = [_tile(f"Test {run.score_name}", "not stated", "no figures from public data")]
    else:
        figure = report_words.percent(run.final.score, of=run.final.pictures)
        tiles = [_tile(f"Test {run.score_name}", figure, run.final.evaluated_on)]
    if certificate.epsilon is None or certificate.delta is None:
        return [*tiles, _tile("Epsilon", "none", "no limit on what can leak")]
    units = (certificate.mechanism or {}).get("num_units")
    bound = "proved upper bound; smaller is more private"
    if reasons_against_release(certificate):
        bound = "of the mechanism, not of this run"
    return [
        *tiles,
        _tile("Epsilon (ε)", report_words.epsilon_text(certificate.epsilon), bound),
        _tile("Delta (δ)", power(certificate.delta), "the remainder that ε does not cover"),
        _tile(
            "Protected",
            f"each {report_words.the_unit(certificate.privacy_unit)}",
            _of_units(units, certificate.privacy_unit),
        ),
    ]


def _of_units(units: object, unit: str) -> str:
    return f"{report_words.number(units)} {report_words.the_unit(unit)}s in the training data" if units else ""


def _tile(label: str, figure: str, detail: str) -> Markup:
    return element(
        "div",
        element("div", label, class_="label"),
        element("div", figure, class_="figure"),
        element("div", detail, class_="detail"),
        class_="tile",
    )


def _setting(run: RunFacts, section: str, key: str) -> str | None:
    values = (run.config or {}).get(section)
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, str) and value else None
