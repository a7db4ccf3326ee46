"""The sections of the page, each from the facts of a run."""

from __future__ import annotations

from dpvision.accounting import balanced_accuracy_bound, true_positive_bound
from dpvision.release import report_words
from dpvision.release.report_bars import bars_of, measured_classes, unmeasured_classes
from dpvision.release.report_blocks import bullets, card, equation, facts, flat, paragraph, power, table
from dpvision.release.report_facts import FinalMetrics, RunFacts, is_private, reasons_against_release
from dpvision.release.report_figures import MARKED_RATES, attack_chart, score_chart
from dpvision.release.report_markup import Markup, element, join
from dpvision.release.report_masks import overlap_rows
from dpvision.release.schema import Certificate
from dpvision.release.statements import proved_profile

_MECHANISM_NAMES = {
    "clip_norm": "Clip norm",
    "noise_multiplier": "Noise multiplier",
    "clipping": "Clipping",
}
_ADJACENCY_NAMES = {
    "add_remove": "one unit added or removed",
    "replace_one": "one unit replaced by another",
    "zero_out": "one unit's contribution left out",
}


def stamp(certificate: Certificate) -> Markup | None:
    """The loud warning of a run that must not be released."""
    reasons = reasons_against_release(certificate)
    if not reasons:
        return None
    caveat = None
    if is_private(certificate):
        caveat = paragraph("Epsilon below describes the mechanism. For this run, don't rely on it as a guarantee.")
    return element("section", element("div", "Not for release", class_="big"), bullets(reasons), caveat, class_="stamp")


def guarantee(certificate: Certificate) -> Markup:
    """The guarantee in plain words, and what it leaves to an attacker."""
    epsilon, delta = certificate.epsilon, certificate.delta
    if epsilon is None or delta is None:
        return card(
            "No guarantee",
            paragraph(
                "This model was trained without privacy. Whoever holds the weights may be able to tell which pictures "
                "it was trained on, or to recover some of them. Treat the weights like the training data."
            ),
        )
    return card(
        "What the mechanism would guarantee" if reasons_against_release(certificate) else "What is guaranteed",
        element(
            "div",
            element("div", *_promise(certificate, epsilon=epsilon, delta=delta)),
            element("div", *_attack_picture(certificate)),
            class_="words",
        ),
    )


def score(run: RunFacts) -> Markup:
    """How good the model is on public data, and how that grew with epsilon."""
    name = report_words.sentence(run.score_name)
    if run.metrics is None or (run.final is None and not run.metrics.curve):
        return card(
            name,
            paragraph(
                f"No {run.score_name} is stated: the release holds no figures from public test data. Figures from the "
                "private training pictures are not shown here, because they are not covered by the guarantee."
            ),
        )
    return card(
        f"{name} over {'epsilon' if is_private(run.certificate) else 'training'}",
        element(
            "div",
            element("div", *_score_words(run)),
            element("div", _curve(run)),
            class_="words",
        ),
    )


def classes(final: FinalMetrics | None, *, private: bool) -> Markup | None:
    """Each class by itself, worst first."""
    rows = measured_classes(final) if final else []
    if final is None or final.accuracy is None or not rows:
        return None
    missing = unmeasured_classes(final)
    absent = paragraph("No test pictures: ", ", ".join(missing), ".", class_="note") if missing else None
    return card(
        "Accuracy of each class",
        paragraph(*_spread(rows[0].name, rows[0].share, rows[-1].name, rows[-1].share)),
        bars_of(rows, overall=final.accuracy),
        paragraph(
            "Dashed: all classes together. Thin line: 95 % interval from the number of test pictures.",
            " Private training tends to cost rare and difficult classes most: look at the worst before use."
            if private
            else "",
            class_="note after",
        ),
        absent,
    )


def charged(certificate: Certificate) -> Markup:
    """What the budget paid for."""
    if not certificate.charged:
        return card("What was charged", paragraph("Nothing: no noisy release was made."))
    rows = [
        (
            report_words.sentence(charge.purpose),
            report_words.number(charge.count),
            report_words.number(charge.sample_rate),
            report_words.number(charge.noise_multiplier),
        )
        for charge in certificate.charged
    ]
    return card(
        "What was charged",
        paragraph("Every look at the private pictures that went through noise, and so is covered by epsilon."),
        table(
            ("Purpose", "Times", "Share of units drawn", "Noise multiplier"),
            rows,
            right=frozenset({1, 2, 3}),
            total=_total(certificate),
        ),
    )


def declared(certificate: Certificate) -> Markup:
    """What was taken as public, and so cost nothing."""
    items = [
        join(report_words.sentence(entry.what), element("span", entry.how, class_="how") if entry.how else None)
        for entry in certificate.declared
    ]
    return card(
        "Declared public",
        paragraph("Used without noise and without charge, because the operator declares it public.", class_="note"),
        bullets(items) if items else paragraph("Nothing."),
    )


def not_covered(certificate: Certificate) -> Markup | None:
    """What epsilon does not speak of."""
    if not is_private(certificate):
        return None
    general = [
        "What the model says about people in general. If it learns that a pattern goes with a disease, that is "
        "knowledge about everyone with the pattern, whether or not they took part."
    ]
    if certificate.privacy_unit != "example":
        general.append(
            f"Several {certificate.privacy_unit}s together: for k of them ε grows to k · ε, and δ by more than k."
        )
    return card(
        "Not covered",
        paragraph("What the guarantee does not promise.", class_="note"),
        bullets([*map(report_words.sentence, certificate.not_covered), *general]),
    )


def mechanism(certificate: Certificate) -> Markup | None:
    """The facts from which epsilon follows."""
    values = certificate.mechanism
    if not values:
        return None
    rows = _mechanism_rows(certificate, values)
    curve = [(power(point.delta), report_words.epsilon_text(point.epsilon)) for point in certificate.curve]
    points = None
    if curve:
        points = element(
            "div",
            element("h3", "Epsilon at other deltas"),
            table(("Delta", "Epsilon"), curve, right=frozenset({1})),
            class_="after",
        )
    return card("Mechanism", facts(rows), points)


def verification(certificate: Certificate) -> Markup:
    """How to check all this without trusting the page."""
    rows: list[tuple[str, str]] = []
    if certificate.ledger is not None:
        entries = f"{certificate.ledger.length:,} entries, head "
        rows.append(("Ledger", join(entries, _hash(certificate.ledger.head))))
    if certificate.weights_sha256:
        rows.append(("Weights, SHA-256", _hash(certificate.weights_sha256)))
    if certificate.config_sha256:
        rows.append(("Settings, SHA-256", _hash(certificate.config_sha256)))
    return card(
        "How to verify it",
        paragraph("This page proves nothing: it shows the files beside it. In the folder that holds it, run"),
        element("pre", "dpvision verify certificate.json"),
        paragraph(
            "This recomputes epsilon from the ledger alone, follows the ledger's chain of hashes and compares the "
            "weights with their hash. It needs neither the training pictures nor PyTorch."
            if is_private(certificate)
            else "This compares the weights with their hash. There is no epsilon to recompute."
        ),
        facts(rows) if rows else None,
    )


def background(run: RunFacts) -> Markup | None:
    """Data, software and settings."""
    parts: list[Markup] = []
    for title, values in (("Data", run.certificate.data), ("Software", run.certificate.software)):
        if values:
            parts.append(element("div", element("h3", title), facts(flat(values))))
    settings = None
    if run.config:
        settings = element("details", element("summary", "All settings of the run"), facts(flat(run.config)))
    if not parts and settings is None:
        return None
    return card("Data, software, settings", element("div", *parts, class_="words"), settings)


def _promise(certificate: Certificate, *, epsilon: float, delta: float) -> list[Markup | None]:
    unit, adjacency = certificate.privacy_unit, certificate.adjacency
    number_of_units = (certificate.mechanism or {}).get("num_units")
    warning = report_words.delta_warning(delta, number_of_units, unit)
    return [
        paragraph(
            f"The guarantee protects {report_words.unit_and_pictures(unit)}. Compare two trainings, "
            f"{report_words.neighbours(adjacency, unit)}: nothing that anyone can read out of the released model is "
            "more than ",
            equation(join("e", element("sup", "ε")), report_words.odds_factor(epsilon)),
            " times as probable after one as after the other, apart from a remainder of at most ",
            equation("δ", power(delta)),
            ".",
        ),
        paragraph(
            "This holds against everyone, whatever they know already (even all other training pictures) and however "
            "long they compute. It can't be undone by anything that is done with the model later."
        ),
        paragraph(report_words.orientation(epsilon)),
        *(paragraph(text, class_="warning") for text in (warning, report_words.less_than_a_person(unit)) if text),
        _other_units(certificate),
        *_attack_table(certificate),
    ]


def _other_units(certificate: Certificate) -> Markup | None:
    """What the same charges prove for whoever owns several units, or for a part of one."""
    if not certificate.other_units:
        return None
    rows = []
    for other in certificate.other_units:
        figure = "nothing is proved"
        if other.epsilon is not None:
            figure = join(
                equation("ε", join(report_words.epsilon_text(other.epsilon), ",")),
                " ",
                equation("δ", power(other.delta)),
            )
        rows.append(join(f"{report_words.sentence(other.unit)}: ", figure, element("span", other.why, class_="how")))
    return element("div", element("h3", "The same training, for other units"), bullets(rows), class_="after")


def _attack_table(certificate: Certificate) -> list[Markup]:
    profile = proved_profile(certificate)
    rows = [
        (
            f"{100 * rate:g} %",
            report_words.bound_percent(true_positive_bound(profile, false_positive_rate=rate)),
            f"{100 * rate:g} %",
        )
        for rate in MARKED_RATES
    ]
    return [
        table(
            ("Outsiders wrongly accused", "Members recognised, at most", "By guessing"), rows, right=frozenset({1, 2})
        ),
        paragraph(
            report_words.equal_chance(balanced_accuracy_bound(profile), certificate.privacy_unit), class_="note after"
        ),
    ]


def _attack_picture(certificate: Certificate) -> list[Markup]:
    return [
        element("h3", "The most that any attack can achieve"),
        paragraph(
            f"An attacker wants to know {report_words.secret(certificate.adjacency, certificate.privacy_unit)}. The "
            "limit follows from the charges and all pairs (ε, δ) that they prove, not from one pair alone.",
            class_="note",
        ),
        attack_chart(proved_profile(certificate)),
    ]


def _score_words(run: RunFacts) -> list[Markup]:
    final = run.final
    if final is None:
        return [
            paragraph("The figures of the finished model are missing; the curve shows what was measured on the way.")
        ]
    rows = _accuracy_rows(final) if final.overlaps is None else overlap_rows(final.overlaps, loss=final.loss)
    if final.weights:
        rows.append(("Weights", final.weights))
    if run.metrics is not None and run.metrics.train_seconds is not None:
        rows.append(("Training time", report_words.duration(run.metrics.train_seconds)))
    spent = (
        "Each point is the model after more steps, with the epsilon spent until then. "
        if is_private(run.certificate)
        else ""
    )
    return [
        paragraph(
            f"{spent}All figures come from public data ({final.evaluated_on}"
            f"{f', {final.pictures:,} pictures' if final.pictures else ''}) and cost no privacy."
        ),
        facts(rows),
    ]


def _accuracy_rows(final: FinalMetrics) -> list[tuple[str, str]]:
    rows = [("Test accuracy", report_words.percent(final.score, of=final.pictures))]
    if final.top5 is not None:
        rows.append(("Top-5 accuracy", report_words.percent(final.top5, of=final.pictures)))
    if final.loss is not None:
        rows.append(("Loss (cross-entropy)", f"{final.loss:.4f}"))
    if final.calibration is not None:
        rows.append(("Calibration error", report_words.percent(final.calibration)))
    return rows


def _curve(run: RunFacts) -> Markup:
    curve, final = run.metrics.curve if run.metrics else (), run.final
    if is_private(run.certificate):
        points = [(point.epsilon, point.score) for point in curve if point.epsilon is not None]
        title = "Epsilon spent"
    else:
        points = [(float(point.step), point.score) for point in curve]
        title = "Steps"
    if not points:
        return paragraph("The curve was not recorded.", class_="note")
    points.sort(key=lambda point: point[0])
    return score_chart(
        points,
        x_title=title,
        score_name=run.score_name,
        final_label=report_words.percent(points[-1][1], of=final.pictures if final else None),
        baseline=final.overlaps.baseline_dice if final and final.overlaps else None,
    )


def _spread(worst: str, worst_share: float, best: str, best_share: float) -> list[str | Markup]:
    if worst_share == best_share:
        return ["All classes are recognised equally well."]
    gap = 100 * (best_share - worst_share)
    return [
        "Worst is ",
        element("b", worst),
        f" with {report_words.percent(worst_share)}, best is ",
        element("b", best),
        f" with {report_words.percent(best_share)}: {gap:.1f} percentage points apart.",
    ]


def _total(certificate: Certificate) -> Markup | None:
    if certificate.epsilon is None or certificate.delta is None:
        return None
    rdp = certificate.epsilon_rdp
    beside = f"; by RDP, as most papers count, {report_words.epsilon_text(rdp)}" if rdp is not None else ""
    return join(
        "Together ",
        equation("ε", report_words.epsilon_text(certificate.epsilon)),
        " at ",
        equation("δ", power(certificate.delta)),
        f", by privacy loss distributions{beside}.",
    )


def _mechanism_rows(certificate: Certificate, values: dict[str, object]) -> list[tuple[str, str]]:
    rest = {key: value for key, value in values.items() if key not in ("privacy_unit", "adjacency")}
    units, batch, planned = (rest.pop(key, None) for key in ("num_units", "expected_batch_size", "steps"))
    divisor = f"{report_words.number(batch)}{' × the clip norm' if rest.pop('unit_norm', False) else ''}"
    rows = [
        ("Unit", f"{certificate.privacy_unit}, {report_words.number(units)} in all"),
        ("Neighbours", _ADJACENCY_NAMES[certificate.adjacency]),
        ("Steps", f"{certificate.steps_taken:,} taken of {report_words.number(planned)} planned"),
        ("Draw", f"each unit by its own coin (Poisson), {report_words.number(batch)} expected per step"),
        ("Divisor", f"{divisor}, a public constant"),
    ]
    return rows + [(_MECHANISM_NAMES.get(name, name), text) for name, text in flat(rest)]


def _hash(value: str) -> Markup:
    return element("span", value, class_="hash")
