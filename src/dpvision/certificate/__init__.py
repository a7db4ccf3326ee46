"""What a release claims about privacy, and what it does not. Every figure comes from the ledger. No torch."""

from __future__ import annotations

from dpvision.certificate.build import ReleaseFacts, build_certificate, with_attachment
from dpvision.certificate.claims import (
    ALWAYS_DECLARED,
    ALWAYS_UNCOVERED,
    COUNTED_UNITS,
    HAND_SEEDED,
    HELD_OUT,
    HISTORY,
    NO_PRIVACY,
    NOT_FOR_RELEASE,
    PIXEL_STATISTICS,
    SHOWN_PICTURES,
    TEST_SPLIT,
    TRAINING_DATA,
    deployment,
    differing_facts,
    history_digest,
    noted_history,
    required_declared,
    required_stamps,
    required_uncovered,
)
from dpvision.certificate.figures import ROW_UNITS, VOLUME, Spent, charged_list, other_units, spent_by, steps_taken
from dpvision.certificate.layout import FORMAT, Attachment, Certificate, OtherUnit, parse_certificate
from dpvision.certificate.text import known_certificate_pages, render_certificate_page, render_certificate_text

__all__ = [
    "ALWAYS_DECLARED",
    "ALWAYS_UNCOVERED",
    "COUNTED_UNITS",
    "FORMAT",
    "HAND_SEEDED",
    "HELD_OUT",
    "HISTORY",
    "NOT_FOR_RELEASE",
    "NO_PRIVACY",
    "PIXEL_STATISTICS",
    "ROW_UNITS",
    "SHOWN_PICTURES",
    "TEST_SPLIT",
    "TRAINING_DATA",
    "VOLUME",
    "Attachment",
    "Certificate",
    "OtherUnit",
    "ReleaseFacts",
    "Spent",
    "build_certificate",
    "charged_list",
    "deployment",
    "differing_facts",
    "history_digest",
    "known_certificate_pages",
    "noted_history",
    "other_units",
    "parse_certificate",
    "render_certificate_page",
    "render_certificate_text",
    "required_declared",
    "required_stamps",
    "required_uncovered",
    "spent_by",
    "steps_taken",
    "with_attachment",
]
