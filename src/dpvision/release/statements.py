"""Every sentence of a certificate, and the names of the declarations in a ledger.

A certificate is rebuilt from its ledger when it is verified, so each format keeps its sentences forever: ``WORDING``
has them by format. To change a sentence, add a format (schema.py); never edit an old one. Declarations are copied from
the ledger into the certificate as they are, so only their names matter here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from dpvision.own_code import GIVEN_IN_PYTHON, hash_text, is_own
from dpvision.privacy.ledger import TRAINING, Entry, charges_of
from dpvision.privacy.mechanism import COUNTED_UNITS, Mechanism
from dpvision.release.schema import FORMAT, Declared, Format

# Privacy units. One of ROW_UNITS is a single row of the data; any other unit owns its rows.
ROW_UNITS = ("example", "slice")
VOLUME = "volume"  # a file with many slices, where it is not known which patient it belongs to

# Purposes of charges besides the training steps: facts that were not declared are computed from the data, with noise.
PIXEL_STATISTICS = "normalisation statistics"

# Names of declarations in a ledger. Where there are two, the first is written today and both are read.
NOT_FOR_RELEASE = "not for release"  # becomes a stamp of the certificate
TRAINING_DATA = "training data"
TEST_SPLIT = "test split"
TRIAL = "trial of a search"  # its how is the identifier of the search
PROCESSES = "processes"
SEVERAL_PROCESSES = (
    "sums of clipped gradients may be computed in several processes and sent to one of them, which adds the noise; the "
    "run's key is sent to all. These processes, their machines and the network between them, which must be encrypted "
    "or closed to others, are trusted"
)
"""Declared by every run that torchrun starts, whatever the number of its processes."""
PRECISION = "precision"
"""Declared by every run whose layers are computed in less than float32."""
OWN_MODEL, OWN_LOSS = "own model", "own loss"
SHOWN_IMAGES_NAMES = ("test images in the release", "test pictures in the release")
HISTORY_NAMES = ("history of the initial weights", "history of the first weights")
SHOWN_IMAGES, HISTORY = SHOWN_IMAGES_NAMES[0], HISTORY_NAMES[0]
NO_EPSILON = "measured without noise, so they get no epsilon"
HELD_OUT = f"held out of training by a keyed draw: images of the private data's own people, {NO_EPSILON}"
OWN_TEST = f"came with the private data: its holder's own images, {NO_EPSILON}"
HELD_OUT_ENDINGS = (
    HELD_OUT,
    "held out of training by a keyed draw and declared public: this run's epsilon does not protect them",
)

NO_PRIVACY = "trained without privacy: no guarantee"
TRIAL_ALONE = (
    "one trial of a hyper-parameter search: the epsilon of this run alone is not the guarantee. Release the result of "
    "the search instead"
)
SEARCH_ACCOUNTING = {
    "pld": "all charges of the search's ledger, every trial in full, by privacy loss distributions (PLD); RDP beside",
    "rdp_filter": "a Rényi filter: the limit that was fixed before the first trial, which no trial may exceed",
    "rdp": "the best of a random, secret number of trials (Papernot and Steinke), by RDP",
}
_CHANGED = "the mechanism was changed during the run: its parts compose, but the plan followed the data"
_UNCOVERED = (
    "How hyper-parameters, architecture and clip norm were chosen outside this run.",
    "Other runs and releases on the same data: each of them composes with this one.",
    "Timing, memory use and other side channels of the machine that trained.",
)
_NEIGHBOURS = {
    "add_remove": "unbounded: one {unit} more or less",
    "zero_out": "one {unit}'s contribution becomes zero, and the number of them stays",
    "replace_one": "bounded: one {unit} becomes another",
}


@final
@dataclass(frozen=True, kw_only=True)
class Wording:
    """The sentences that differ between formats. ``{unit}`` in them is the privacy unit.

    Attributes:
        image: The word for an image.
        values: The word for a measured or computed number.
        hand_seeded: The stamp of a run whose key was made from a seed.
        declared_by: How the public facts of every run are declared.
        uncovered: What no certificate covers.
        beyond_most_rows: Not covered where rows per owner are limited to ``{most_rows}``.
        large_delta: Not covered where ``{delta}`` is at least 1 / ``{num_units}``.
        held_out: Not covered where the test split was held out of the private data.
        one_row: Another unit, and why its epsilon holds: one row of a unit that owns several.
        owner: The same for an owner of at most ``{most_rows}`` units.
        deployment: How the guarantee is meant, in the terms of NIST SP 800-226 and of the registry of deployments.
        page_intro: The first sentence of certificate.md.
        no_guarantee: What certificate.md says of a run without privacy.
        accused: The heading of false positive rates.
    """

    image: str
    values: str
    hand_seeded: str
    declared_by: str
    uncovered: tuple[str, ...]
    beyond_most_rows: str
    large_delta: str
    held_out: str
    one_row: tuple[str, str]
    owner: tuple[str, str]
    deployment: Mapping[str, str]
    page_intro: str
    no_guarantee: str
    accused: str


_FORMAT_2 = Wording(
    image="picture",
    values="figure",
    hand_seeded="hand-seeded key: whoever knows the seed can subtract the noise; reproducible, not for release",
    declared_by="declared public by whoever configured the run",
    uncovered=(
        *_UNCOVERED,
        "Floating-point arithmetic: the proof speaks of real numbers. Noise is drawn and added in finite precision.",
        "The honesty of the program that wrote the ledger: hashes show later changes, not a lie at the time of "
        "writing.",
        "Whoever can read private/: it holds the key of the noise.",
        "Whoever also has pictures in the test split: figures on those are published without noise.",
    ),
    beyond_most_rows=(
        "One {unit} more or less of an owner who has more than {most_rows}: those beyond are left out, and another one "
        "may come in or go. Owners as a whole have their figure under other_units."
    ),
    large_delta=(
        "Delta {delta:g} is not below 1/{num_units}: a mechanism that publishes one {unit} in full could keep such a "
        "guarantee."
    ),
    held_out="The units held out for testing: figures on them are published without noise.",
    one_row=(
        "one picture of a {unit} who has others too, added, removed or changed",
        "the {unit} stays and its clipped gradient becomes another one: replacement of a {unit}, by PLD",
    ),
    owner=(
        "an owner of at most {most_rows} {unit}s, with all of them",
        "each {unit} of the owner joins a step by itself, and the owner moves the sum by a binomial number of clip "
        "norms: a mixture of Gaussians a step, composed by PLD",
    ),
    deployment={
        "flavour": "approximate differential privacy: (epsilon, delta)",
        "neighbours": "",  # by adjacency
        "trust_model": "central: a trusted curator holds the pictures in the clear, trains, and adds the noise",
        "release_type": "static: one model and the files beside it; the weights after every step are covered too",
        "mechanism": "Gaussian noise on the sum of clipped gradients, once a step (DP-SGD)",
        "sampling": "Poisson: each {unit} joins each step with the same probability, independently, in secret",
        "accounting": "all charges of this run's ledger, by privacy loss distributions, and by RDP beside them",
        "composition": "other runs and releases on the same data are not counted",
        "post_processing": "division by a public constant, optimizer, schedule and averaging see noisy sums alone",
        "parameters": "epsilon and delta are upper bounds that dpvision verify recomputes from the ledger",
        "noise_source": "AES-256 in counter mode under a secret from the operating system; float64, on a public grid",
        "access": "private/ stays with the curator: whoever has it can subtract the noise",
        "utility": "figures in metrics.json are measured on data declared public, without noise",
    },
    page_intro="Made from certificate.json alone; `dpvision verify` recomputes every figure from the ledger beside it.",
    no_guarantee="There is no guarantee: parts of the training data may be read off such a model.",
    accused="outsiders wrongly accused",
)
_FORMAT_3 = Wording(
    image="image",
    values="value",
    hand_seeded="hand-seeded key: anyone who knows the seed can subtract the noise; reproducible, not for release",
    declared_by="declared public in the configuration of the run",
    uncovered=(
        *_UNCOVERED,
        "Floating-point arithmetic: the proof is for real numbers, but noise is drawn and added in finite precision.",
        "The honesty of the program that wrote the ledger: hashes show later changes, not false entries.",
        "Anyone who can read private/: it holds the key of the noise.",
        "People with images in the test split: metrics on those images are published without noise.",
    ),
    beyond_most_rows=(
        "A change of one {unit} of an owner with more than {most_rows}: only the first {most_rows} are used, so "
        "another one may take its place. The epsilon of a whole owner is given under other_units."
    ),
    large_delta=(
        "Delta {delta:g} is not below 1/{num_units}: a mechanism that publishes one {unit} in full could satisfy such "
        "a guarantee."
    ),
    held_out="The units held out for testing: metrics on them are published without noise.",
    one_row=(
        "one image of a {unit} that has several, added, removed or changed",
        "the {unit} stays and its clipped gradient changes: replacement of a {unit}, by PLD",
    ),
    owner=(
        "an owner of at most {most_rows} {unit}s, with all of them",
        "each {unit} of the owner is sampled independently, so the owner moves the sum by a binomial number of clip "
        "norms: a mixture of Gaussians in each step, composed by PLD",
    ),
    deployment={
        **_FORMAT_2.deployment,
        "trust_model": "central: a trusted curator stores the images, trains, and adds the noise",
        "sampling": "Poisson: each {unit} joins each step independently with the same probability; the draw is secret",
        "accounting": "all charges of this run's ledger, by privacy loss distributions (PLD); RDP for comparison",
        "post_processing": "division by a public constant, optimizer, schedule and averaging only see noisy sums",
        "access": "private/ stays with the curator: anyone who has it can subtract the noise",
        "utility": "the metrics in metrics.json are measured on data declared public, without noise",
    },
    page_intro="Made from certificate.json only; `dpvision verify` recomputes every value from the ledger beside it.",
    no_guarantee="There is no guarantee: parts of the training data may be recovered from such a model.",
    accused="non-members wrongly accused",
)
_FORMAT_4 = replace(
    _FORMAT_3,
    uncovered=(
        *_FORMAT_3.uncovered,
        "Refusals and error messages about input files: whoever starts the run sees them before anything is spent; "
        "they are not part of the release.",
    ),
)
WORDING: Mapping[Format, Wording] = {2: _FORMAT_2, 3: _FORMAT_3, 4: _FORMAT_4}
HAND_SEEDED = WORDING[FORMAT].hand_seeded
HAND_SEEDED_STAMPS = frozenset(words.hand_seeded for words in WORDING.values())


def stamps_of(
    ledger: Sequence[Entry],
    mechanism: Mechanism | None,
    *,
    hand_seeded: bool = False,
    version: Format = FORMAT,
    searched: bool = False,
) -> list[str]:
    """Return the reasons against a release, each once.

    Args:
        ledger: The entries of the run's ledger.
        mechanism: What the run was planned with; None without privacy.
        hand_seeded: Whether the key is known to be made from a seed. The ledger may say so, too.
        version: The format of the certificate.
        searched: Whether the certificate states the cost of the search that the run is a trial of.

    Returns:
        Sentences; none if the run may be released.
    """
    known = hand_seeded or ledger[0].payload.get("hand_seeded")
    stamps = [WORDING[version].hand_seeded] if known else []
    notes = [entry.payload for entry in ledger if entry.kind == "declare"]
    stamps += [note["how"] for note in notes if note["what"] == NOT_FOR_RELEASE]
    if not searched and any(note["what"] == TRIAL for note in notes):
        stamps.append(TRIAL_ALONE)
    if mechanism is None:
        return list(dict.fromkeys([*stamps, NO_PRIVACY]))
    trained = [(event, count) for event, count in charges_of(ledger) if event.purpose == TRAINING]
    steps = sum(count for _, count in trained)
    if any(event != mechanism.step_event for event, _ in trained):
        stamps.append(_CHANGED)
    if steps > mechanism.steps:
        stamps.append(f"{steps} steps were charged, but {mechanism.steps} were planned")
    return list(dict.fromkeys(stamps))


def declared_in(ledger: Sequence[Entry], *, version: Format = FORMAT) -> list[Declared]:
    """Return what the certificate declares: the facts of every run, the ledger's declarations and its forks.

    Args:
        ledger: The entries of the run's ledger.
        version: The format of the certificate.

    Returns:
        Each declaration once, in the order of the ledger.
    """
    words = WORDING[version]
    counted = any(event.purpose == COUNTED_UNITS for event, _ in charges_of(ledger))
    facts = f"{'' if counted else 'num_units, '}class names and {words.image} shape"
    found = [(facts, words.declared_by)]
    declared = [entry.payload for entry in ledger if entry.kind == "declare"]
    found += [(note["what"], note["how"]) for note in declared if note["what"] != NOT_FOR_RELEASE]
    found += [
        (f"fork {e.payload['fork']} at step {e.payload['step']}", f"{e.payload['reason']}; repeated steps are charged")
        for e in ledger
        if e.kind == "fork"
    ]
    return [Declared(what=what, how=how) for what, how in dict.fromkeys(found)]


def data_names(ledger: Sequence[Entry]) -> list[str]:
    """Return the names of the training data that a ledger declares; several after a fork to other data."""
    declared = [entry.payload for entry in ledger if entry.kind == "declare"]
    return [note["how"] for note in declared if note["what"] == TRAINING_DATA]


def not_covered_by(ledger: Sequence[Entry], *, version: Format = FORMAT) -> list[str]:
    """Return what the certificate says that its guarantee does not cover.

    Args:
        ledger: The entries of the run's ledger.
        version: The format of the certificate.

    Returns:
        Sentences: those of every certificate, then those that this run's unit, delta and test split add.
    """
    header, words = ledger[0].payload, WORDING[version]
    found, unit, most_rows = list(words.uncovered), header["privacy_unit"], header.get("most_rows_per_owner")
    if unit in ROW_UNITS:
        found.append(f"A person who owns several {unit}s: the guarantee protects one {unit} at a time.")
        if most_rows is not None:
            found.append(words.beyond_most_rows.format(unit=unit, most_rows=most_rows))
    if unit == VOLUME:
        found.append("A patient with several volumes: each volume counts as a unit of its own.")
    if header["delta"] is not None and not header["delta"] < 1 / header["num_units"]:
        found.append(words.large_delta.format(delta=header["delta"], num_units=header["num_units"], unit=unit))
    if any(note.what == TEST_SPLIT and note.how.endswith(HELD_OUT_ENDINGS) for note in declared_in(ledger)):
        found.append(words.held_out)
    return found


def test_images_without_epsilon(declared: Iterable[Declared]) -> str | None:
    """Return what is declared of test images that are the data holder's own; None where the test images are public."""
    notes = (note.how for note in declared if note.what == TEST_SPLIT)
    return next((how for how in notes if how.endswith((NO_EPSILON, *HELD_OUT_ENDINGS))), None)


def deployment_of(ledger: Sequence[Entry], *, version: Format = FORMAT) -> dict[str, str]:
    """Return how the guarantee is meant.

    Args:
        ledger: The entries of the run's ledger.
        version: The format of the certificate.

    Returns:
        Answers by question; none without privacy.
    """
    header = ledger[0].payload
    if header["delta"] is None:
        return {}
    answers = {**WORDING[version].deployment, "neighbours": _NEIGHBOURS[header["adjacency"]]}
    if header.get("hand_seeded"):
        answers["noise_source"] = "a hand-seeded key"
    if isinstance(header.get("target_risk"), str):
        answers["target_risk"] = (
            f"the noise was calibrated to this limit on membership attacks: {header['target_risk']}"
        )
    if (test_images_without_epsilon(declared_in(ledger)) or "").endswith(NO_EPSILON):
        answers["utility"] = f"the metrics in metrics.json are of the data holder's own test images, {NO_EPSILON}"
    return {question: answer.replace("{unit}", header["privacy_unit"]) for question, answer in answers.items()}


def own_code_declarations(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of (what, how) that name the user's own model and loss: file, function and SHA-256 of the source.

    Args:
        config: The content of the released config.json.

    Returns:
        None to two pairs.
    """
    model = config.get("model")
    chosen: Mapping[str, Any] = model if isinstance(model, dict) else {}
    weights = "; the initial weights that it makes are declared public, and this run's epsilon protects no data in them"
    named = (
        (OWN_MODEL, chosen.get("name"), chosen.get("sha256"), weights),
        (OWN_LOSS, config.get("loss"), config.get("loss_sha256"), ""),
    )
    found = []
    for what, name, sha256, more in named:
        if isinstance(name, str) and is_own(name):
            file, _, function = name.rpartition(":")
            place = f"{function}, given in Python" if file == GIVEN_IN_PYTHON else f"{function} in {file}"
            found.append((what, f"{place}, {hash_text(sha256)}{more}"))
    return found


def is_noted_own_code(named: Sequence[tuple[str, str]], ledger: Iterable[Entry]) -> bool:
    """Return whether the ledger declares this own code; several models or losses after forks to other code."""
    notes = [(e.payload["what"], e.payload["how"]) for e in ledger if e.kind == "declare"]
    own = [note for note in notes if note[0] in (OWN_MODEL, OWN_LOSS)]
    return set(named) <= set(own) and {what for what, _ in named} == {what for what, _ in own}


def history_digest(transfer: object) -> str | None:
    """Return the SHA-256 of what a configuration says of the initial weights and all before them; None if nothing."""
    if transfer is None:
        return None
    return hashlib.sha256(json.dumps(transfer, sort_keys=True).encode()).hexdigest()


def noted_history(ledger: Iterable[Entry]) -> str | None:
    """Return the same as the ledger declares it. The last one counts, since a fork may bring other weights."""
    notes = [e.payload["how"] for e in ledger if e.kind == "declare" and e.payload["what"] in HISTORY_NAMES]
    return notes[-1].removeprefix("SHA-256 ") if notes else None
