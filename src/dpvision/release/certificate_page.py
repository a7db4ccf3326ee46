"""A certificate in plain words, and as a page in Markdown. Both are made from certificate.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dpvision.accounting import DISPLAY_RATE, cautions, describe
from dpvision.privacy.mechanism import Guarantee, rounded_up
from dpvision.release.schema import Certificate, parse_certificate

_WHERE_MU_ENDS = " Beyond that epsilon mu proves nothing: only the curve does."
_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]<>|#"})


def render_certificate_text(certificate: Mapping[str, Any]) -> str:
    """The certificate in plain words."""
    return "\n".join(_lines(parse_certificate(certificate))) + "\n"


def _lines(certificate: Certificate) -> Iterator[str]:
    yield "For release." if certificate.for_release else "NOT FOR RELEASE:"
    yield from (f"  - {stamp}" for stamp in certificate.stamps)
    yield from _guarantee_lines(certificate)
    yield "Charged:"
    yield from (f"  - {text}" for text in _charges(certificate))
    yield "Declared, not charged:"
    yield from (f"  - {item.what}: {item.how}" for item in certificate.declared)
    yield "Not covered:"
    yield from (f"  - {text}" for text in certificate.not_covered)
    yield f"Ledger: {certificate.ledger.length} entries, head {certificate.ledger.head}"
    yield f"Weights: SHA-256 {certificate.weights_sha256}"


def _guarantee_lines(certificate: Certificate) -> Iterator[str]:
    proved = _proved(certificate)
    if proved is None or certificate.epsilon_rdp is None:
        yield "There is no guarantee: parts of the training data may be read off such a model."
        return
    yield (
        f"Epsilon {rounded_up(proved.epsilon)} at delta {rounded_up(proved.delta)} for {proved.adjacency} of one "
        f"{proved.privacy_unit}, by PLD ({rounded_up(certificate.epsilon_rdp)} by RDP)."
    )
    yield describe(proved, true_positive_rate=_stated_bound(certificate))
    yield from _other_lines(certificate)
    yield from (f"Caution: {text}" for text in cautions(proved, num_units=certificate.mechanism["num_units"]))


def _stated_bound(certificate: Certificate) -> float | None:
    """The certificate's bound on attacks at the rate that ``describe`` names; None in releases without one."""
    bounds = {bound.false_positive_rate: bound.true_positive_rate for bound in certificate.attack_success}
    return bounds.get(DISPLAY_RATE)


def _other_lines(certificate: Certificate) -> Iterator[str]:
    for other in certificate.other_units:
        figure = "nothing is proved" if other.epsilon is None else f"epsilon {rounded_up(other.epsilon)}"
        yield f"For {other.unit}: {figure} at delta {rounded_up(other.delta)} ({other.why})."


def _charges(certificate: Certificate) -> list[str]:
    return [
        f"{part.purpose}, {part.count} times: each {certificate.privacy_unit} joins with probability "
        f"{part.sample_rate:.6g}, noise {part.noise_multiplier:.6g} times the most that one can add"
        for part in certificate.charged
    ]


def _proved(certificate: Certificate) -> Guarantee | None:
    if certificate.epsilon is None or certificate.delta is None:
        return None
    return Guarantee(
        epsilon=certificate.epsilon,
        delta=certificate.delta,
        adjacency=certificate.adjacency,
        accountant="pld",
        privacy_unit=certificate.privacy_unit,
    )


def render_certificate_page(certificate: Mapping[str, Any]) -> str:
    """The whole certificate as a page in Markdown."""
    return "\n\n".join(_sections(parse_certificate(certificate))) + "\n"


def known_certificate_pages(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """The page, and its two earlier forms, so that earlier releases still verify.

    Earlier pages described the attack bound of one (epsilon, delta) pair, and still earlier ones did not say where mu
    ends.
    """
    page = render_certificate_page(certificate)
    parsed = parse_certificate(certificate)
    proved = _proved(parsed)
    earlier = page
    if proved is not None:
        now = _safe(describe(proved, true_positive_rate=_stated_bound(parsed)))
        earlier = page.replace(now, _safe(describe(proved)))
    return page, earlier, *(text.replace(_WHERE_MU_ENDS, "") for text in (page, earlier))


def _sections(certificate: Certificate) -> Iterator[str]:
    yield "# Privacy certificate"
    yield "Made from certificate.json alone; `dpvision verify` recomputes every figure from the ledger beside it."
    if certificate.for_release:
        yield "**For release.**"
    else:
        yield "**NOT FOR RELEASE:**\n" + _items(certificate.stamps)
    yield "\n\n".join(_safe(line) for line in _guarantee_lines(certificate))
    yield from _curve_sections(certificate)
    yield "## Charged\n" + _items(_charges(certificate) or ["nothing"])
    yield "## Declared, not charged\n" + _table(("what", "how"), [(d.what, d.how) for d in certificate.declared])
    yield "## Not covered\n" + _items(certificate.not_covered)
    if certificate.deployment:
        yield "## How it is meant\n" + _table(("question", "answer"), list(certificate.deployment.items()))
        facts = {**certificate.mechanism, "sampler": certificate.sampler, "divisor": certificate.divisor}
        yield "## Mechanism\n" + _table(("setting", "value"), [(name, str(value)) for name, value in facts.items()])
    yield "## What it is about\n" + _table(("file", "SHA-256"), _hashes(certificate))
    versions = [(name, str(version)) for name, version in certificate.software.items()]
    yield "## Software\n" + _table(("package", "version"), versions)


def _curve_sections(certificate: Certificate) -> Iterator[str]:
    if certificate.curve:
        points = [(rounded_up(point.delta), rounded_up(point.epsilon)) for point in certificate.curve]
        yield "## The whole curve\nAll of these hold at once.\n\n" + _table(("delta", "epsilon"), points)
    gaussian = certificate.gaussian_dp
    if gaussian is not None:
        yield (
            f"At every epsilon up to {gaussian.epsilon_up_to:.4g} the run is at least as private as one Gaussian "
            f"release of shift {rounded_up(gaussian.mu)} (Gaussian differential privacy, mu).{_WHERE_MU_ENDS}"
        )
    if certificate.attack_success:
        rates = [
            (f"{100 * bound.false_positive_rate:g} %", f"{rounded_up(100 * bound.true_positive_rate)} %")
            for bound in certificate.attack_success
        ]
        yield "## The most that any attack achieves\n" + _table(
            ("outsiders wrongly accused", "members found, at most"), rates
        )


def _hashes(certificate: Certificate) -> list[tuple[str, str]]:
    return [
        ("weights.safetensors", certificate.weights_sha256),
        ("config.json", certificate.config_sha256),
        (f"ledger.jsonl, head of {certificate.ledger.length} entries", certificate.ledger.head),
        *((attachment.name, attachment.sha256) for attachment in certificate.attachments),
    ]


def _items(texts: Iterable[str]) -> str:
    return "\n".join(f"- {_safe(text)}" for text in texts)


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {right} |" for left, right in ((_cell(a), _cell(b)) for a, b in lines))


def _cell(text: str) -> str:
    return text if text == "---" else _safe(text)


def _safe(text: str) -> str:
    """Text from elsewhere (names of files and classes) as text: no markup, one line."""
    return "".join(c if c.isprintable() else " " for c in text).translate(_SPECIAL)
