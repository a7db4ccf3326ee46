"""The certificate for readers: certificate.md, made from certificate.json only.

Also the helpers of Markdown that the model card shares: ``safe_markdown`` and ``markdown_table``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dpvision.accounting import DISPLAY_RATE, cautions, describe
from dpvision.privacy.mechanism import Guarantee, rounded_up
from dpvision.release.schema import Certificate, SearchClaim, parse_certificate
from dpvision.release.statements import NO_EPSILON, WORDING, test_images_without_epsilon

_WHERE_MU_ENDS = " Beyond that epsilon mu proves nothing: only the curve does."
_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]<>|#"})


def render_certificate_page(certificate: Mapping[str, Any]) -> str:
    """Return the whole certificate as Markdown.

    Args:
        certificate: The content of certificate.json.

    Returns:
        The content of certificate.md. Names from elsewhere are escaped, and bounds are rounded up.
    """
    return "\n\n".join(_sections(parse_certificate(certificate))) + "\n"


def known_certificate_pages(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the page, and for format 2 also its first version, which did not say where mu ends."""
    page = render_certificate_page(certificate)
    return (page, page.replace(_WHERE_MU_ENDS, "")) if certificate["format"] == 2 else (page,)


def safe_markdown(text: str) -> str:
    """Return text from elsewhere (names of files and classes) as one line without markup."""
    return "".join(c if c.isprintable() else " " for c in text).translate(_SPECIAL)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; its cells are escaped."""
    lines = ["| " + " | ".join(safe_markdown(cell) for cell in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in head) + " |", *lines[1:]])


def _sections(certificate: Certificate) -> Iterator[str]:
    """The paragraphs of the page, in their order."""
    yield "# Privacy certificate"
    yield WORDING[certificate.format].page_intro
    yield "**For release.**" if certificate.for_release else "**NOT FOR RELEASE:**\n" + _items(certificate.stamps)
    yield "\n\n".join(safe_markdown(line) for line in _guarantee_lines(certificate))
    own = test_images_without_epsilon(certificate.declared)
    if own is not None and own.endswith(NO_EPSILON):
        yield f"**No epsilon for the test images:** {safe_markdown(own)}."
    yield from _curve_sections(certificate)
    yield "## Charged\n" + _items(_charges(certificate) or ["nothing"])
    yield "## Declared, not charged\n" + markdown_table(
        ("what", "how"), [(item.what, item.how) for item in certificate.declared]
    )
    yield "## Not covered\n" + _items(certificate.not_covered)
    if certificate.deployment:
        yield "## How it is meant\n" + markdown_table(("question", "answer"), certificate.deployment.items())
        facts = {**certificate.mechanism, "sampler": certificate.sampler, "divisor": certificate.divisor}
        yield "## Mechanism\n" + markdown_table(("setting", "value"), _texts(facts))
    yield "## What it is about\n" + markdown_table(("file", "SHA-256"), _hashes(certificate))
    yield "## Software\n" + markdown_table(("package", "version"), _texts(certificate.software))


def _guarantee_lines(certificate: Certificate) -> Iterator[str]:
    """Epsilon and delta, what they mean, other units, and cautions."""
    if certificate.epsilon is None or certificate.delta is None or certificate.epsilon_rdp is None:
        yield WORDING[certificate.format].no_guarantee
        return
    proved = Guarantee(
        epsilon=certificate.epsilon,
        delta=certificate.delta,
        adjacency=certificate.adjacency,
        accountant="pld",
        privacy_unit=certificate.privacy_unit,
    )
    by = f"PLD ({rounded_up(certificate.epsilon_rdp)} by RDP)"
    if certificate.search is not None and certificate.search.accountant != "pld":
        by = "RDP"
    yield (
        f"Epsilon {rounded_up(proved.epsilon)} at delta {rounded_up(proved.delta)} for {proved.adjacency} of one "
        f"{proved.privacy_unit}, by {by}."
    )
    if certificate.search is not None:
        yield search_sentence(certificate.search)
    bounds = {bound.false_positive_rate: bound.true_positive_rate for bound in certificate.attack_success}
    # Pages of format 2 describe the looser bound of the (epsilon, delta) pair.
    yield describe(proved, true_positive_rate=None if certificate.format == 2 else bounds.get(DISPLAY_RATE))
    for other in certificate.other_units:
        epsilon = "nothing is proved" if other.epsilon is None else f"epsilon {rounded_up(other.epsilon)}"
        yield f"For {other.unit}: {epsilon} at delta {rounded_up(other.delta)} ({other.why})."
    yield from (f"Caution: {text}" for text in cautions(proved, num_units=certificate.mechanism["num_units"]))


def search_sentence(search: SearchClaim) -> str:
    """Say what the headline epsilon covers, and that the epsilon of the run alone is not the guarantee."""
    if search.price == "best_of":
        what = (
            f"the best of a random number of trials ({search.stopping}, mean {search.mean_trials:g}; the number is "
            "secret)"
        )
    else:
        again = f", {search.repeated} of them charged again after a crash" if search.repeated else ""
        what = f"a search of {search.trials} trials{again}"
    return (
        f"This epsilon is that of {what}, sampled by {search.sampler}, with scores on {search.score} data. The chosen "
        f"run alone has epsilon {rounded_up(search.epsilon_of_this_run_alone)}: shown for comparison, NOT the "
        "guarantee, since the other trials used the same data."
    )


def _curve_sections(certificate: Certificate) -> Iterator[str]:
    """The proved pairs, Gaussian DP, and the bounds on attacks."""
    if certificate.curve:
        points = [(rounded_up(point.delta), rounded_up(point.epsilon)) for point in certificate.curve]
        yield "## The whole curve\nAll of these hold at once.\n\n" + markdown_table(("delta", "epsilon"), points)
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
        head = (WORDING[certificate.format].accused, "members found, at most")
        yield "## The most that any attack achieves\n" + markdown_table(head, rates)


def _charges(certificate: Certificate) -> list[str]:
    """Each kind of charge as a sentence."""
    return [
        f"{part.purpose}, {part.count} times: each {certificate.privacy_unit} joins with probability "
        f"{part.sample_rate:.6g}, noise {part.noise_multiplier:.6g} times the most that one can add"
        for part in certificate.charged
    ]


def _hashes(certificate: Certificate) -> list[tuple[str, str]]:
    """The files that the certificate is about, with their hashes."""
    return [
        ("weights.safetensors", certificate.weights_sha256),
        ("config.json", certificate.config_sha256),
        (f"ledger.jsonl, head of {certificate.ledger.length} entries", certificate.ledger.head),
        *(
            [(f"search.jsonl, head of {certificate.search.ledger.length} entries", certificate.search.ledger.head)]
            if certificate.search is not None
            else []
        ),
        *((attachment.name, attachment.sha256) for attachment in certificate.attachments),
    ]


def _texts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in values.items()]


def _items(texts: Iterable[str]) -> str:
    return "\n".join(f"- {safe_markdown(text)}" for text in texts)
