"""Damage run folders in random ways, and see that each damage is named, refused or without effect.

Usage: python -m tools.tamper_runs [--cases 10000] [--seed 0] [--folder DIR]

A short run is made and kept in three states: finished, stopped half-way (with a release of its own), and killed. Each
case copies one of them, flips, cuts, inserts, edits, swaps, deletes or rolls back something in it, and asks:

* does ``dpvision verify`` name a problem that was not there before? (named)
* else, is what can be given away, byte by byte, a release that the run made itself? If not, that is a failure.
* does ``dpvision resume`` refuse? (refused)
* else, does the resumed run end with the very bytes of the run left alone: weights, ledger, certificate? (harmless)

Anything else is a failure, and so is any error that is not one clear line. Runs that are not finished are resumed even
if ``verify`` named the damage: resuming must be safe by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from dpvision.errors import DPVisionError
from dpvision.privacy.ledger import Ledger, read_ledger
from dpvision.privacy.mechanism import Event

STEPS, STOPPED_AT, KILLED_AT = 12, 6, 10
CLAIMS = ("epsilon", "epsilon_rdp", "delta", "steps_taken", "weights_sha256", "config_sha256", "privacy_unit", "stamps")


class Killed(BaseException):
    """Ends a run between two steps, as a power cut would."""


@final
@dataclass(frozen=True)
class World:
    """The run in its three states, as folders that are only copied from, and the end of the run left alone."""

    states: dict[str, Path]
    problems: dict[str, frozenset[str]]
    ends: dict[str, tuple[object, ...]]


@final
@dataclass
class Tally:
    """What became of the cases, by what was damaged."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def total(self, outcome: str) -> int:
        """Cases of this outcome."""
        return sum(count for (_, found), count in self.outcomes.items() if found == outcome)


def make_world(folder: Path) -> World:
    """Train the run: left alone, stopped by a signal half-way, and killed."""
    from dpvision.release.verify import verify

    source = _write_pictures(folder / "pictures.npz")
    states = {name: folder / name for name in ("finished", "stopped", "killed")}
    _run(source, states["finished"])
    _run(source, states["stopped"], stop_at=STOPPED_AT)
    _run(source, states["killed"], kill_at=KILLED_AT)
    ends = {}
    for name, path in states.items():
        copy = folder / f"{name}-to-its-end"
        shutil.copytree(path, copy)
        _resume(copy)
        ends[name] = end_of(copy)
    problems = {name: frozenset(_named(verify(path).problems, path)) for name, path in states.items()}
    if problems["finished"] or problems["stopped"]:
        raise SystemExit(f"the untouched runs are not in order: {problems}")
    return World(states, problems, ends)


def _write_pictures(path: Path) -> Path:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, size=(90, 1, 8, 8), dtype=np.uint8)
    labels = np.arange(90) % 3
    np.savez(path, x_train=images[:60], y_train=labels[:60], x_test=images[60:], y_test=labels[60:])
    return path


def _run(source: Path, path: Path, *, stop_at: int | None = None, kill_at: int | None = None) -> None:
    from dpvision.config import parse_config
    from dpvision.storage.run_folder import RunFolder
    from dpvision.training import train
    from dpvision.training.callbacks import RunCallback

    privacy = {"noise_multiplier": 1.3, "delta": 1e-3, "num_units": 60, "expected_batch_size": 20.0, "clip_norm": 0.7}
    config = parse_config(
        {
            "name": "tampered",
            "data": {"source": str(source)},
            "model": {"name": "linear", "options": {"image_size": 8}},
            "privacy": {**privacy, "steps": STEPS},
            "optimizer": {"name": "sgd", "learning_rate": 0.5, "momentum": 0.5},
            "averaging": {"kind": "ema", "decay": 0.9},
            "evaluations": 3,
            "checkpoint_every": 4,
        }
    )

    class Interrupting(RunCallback):
        def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
            del epsilon_bound
            if done == kill_at:
                raise Killed
            if done == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        train(config, run=path, seed=5, callback=Interrupting())
        with RunFolder.open(path) as folder:
            folder.add_to_release("report.html", b"<html>a report</html>\n")
    except Killed:
        pass


def _resume(path: Path) -> None:
    from dpvision.training import resume_training

    resume_training(path)


def end_of(run: Path) -> tuple[object, ...]:
    """What must come out the same: weights, certificate, and the ledger, where only its last release counts.

    A run that was stopped wrote a release, to which its ledger commits; a run rolled back to before that did not.
    """
    certificate = json.loads((run / "release" / "certificate.json").read_bytes())
    del certificate["ledger"]
    entries = read_ledger(run / "release" / "ledger.jsonl")
    kept = [(e.kind, e.payload) for e in entries if e.kind != "release" or e is entries[-1]]
    return (run / "release" / "weights.safetensors").read_bytes(), certificate, kept


def _named(problems: tuple[str, ...], run: Path) -> list[str]:
    """Problems without the place of the folder, so that those of two copies can be compared."""
    return [problem.replace(str(run), "") for problem in problems]


# ---- what is done to a run


def targets_of(run: Path) -> dict[str, Path]:
    """Everything that the guarantee or a resume rests on, by what it is."""
    checkpoints = sorted((run / "private" / "checkpoints").glob("step-*"), reverse=True)
    found = {f"checkpoint {place}": path for place, path in zip(("newest", "older"), checkpoints, strict=False)}
    found |= {path.name: path for path in sorted((run / "release").iterdir()) if path.is_file()}
    found |= {f"private {name}": run / "private" / name for name in ("key.json", "config.json")}
    kept = {"withdrawn certificate": "withdrawn-certificate.json", "mark of the release": "released-ledger.json"}
    marks = {name: run / "private" / file for name, file in kept.items()}
    return found | {name: path for name, path in marks.items() if path.exists()}


def changed(content: bytes, chance: random.Random) -> bytes:
    """Other bytes in their place: a flipped bit, a cut, an insertion, an edited figure, moved lines."""
    at = chance.randrange(len(content))
    lines = content.splitlines(keepends=True)
    line, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    digits = [place for place, byte in enumerate(content) if 48 <= byte <= 57]
    digit = chance.choice(digits) if digits else at
    swapped = list(lines)
    swapped[line], swapped[other] = swapped[other], swapped[line]
    edits: tuple[Callable[[], bytes], ...] = (
        lambda: content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :],
        lambda: content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :],
        lambda: content[:at],
        lambda: content[:at] + content[at + chance.randint(1, 64) :],
        lambda: content[:at] + chance.randbytes(chance.randint(1, 64)) + content[at:],
        lambda: content[:digit] + str(chance.randrange(10)).encode() + content[digit + 1 :],
        lambda: b"".join(swapped),
        lambda: b"".join([*lines[: line + 1], *lines[line:]]),
        lambda: b"".join([*lines[:line], *lines[line + 1 :]]),
        lambda: chance.randbytes(len(content)),
    )
    return chance.choice(edits)()


def damage_file(run: Path, world: World, chance: random.Random) -> str:
    """Change the bytes of one file."""
    del world
    name, path = chance.choice(sorted(targets_of(run).items()))
    path.write_bytes(changed(path.read_bytes(), chance))
    return name


def delete_files(run: Path, world: World, chance: random.Random) -> str:
    """Take one to three files away."""
    del world
    names = chance.sample(sorted(targets_of(run)), chance.choice((1, 1, 2, 3)))
    for path in [targets_of(run)[name] for name in names]:
        path.unlink()
    return "deleted"


def roll_back(run: Path, world: World, chance: random.Random) -> str:
    """Put some files of an earlier state of the same run in the place of the present ones."""
    earlier = world.states[chance.choice(("stopped", "killed"))]
    here, there = targets_of(run), targets_of(earlier)
    for name in chance.sample(sorted(there), chance.randint(1, len(there))):
        if name.startswith("checkpoint"):
            shutil.copy(there[name], run / "private" / "checkpoints" / there[name].name)
        else:
            shutil.copy(there[name], here.get(name, run / there[name].relative_to(earlier)))
    for name in chance.sample(["checkpoint newest", "checkpoint older"], chance.randrange(3)):
        here[name].unlink(missing_ok=True)
    return "rolled back"


def shorten_ledger(run: Path, world: World, chance: random.Random) -> str:
    """The ledger to a valid prefix, with or without the checkpoints that remember more."""
    del world
    path = run / "release" / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: chance.randint(1, len(lines) - 1)]))
    for name in chance.sample(["checkpoint newest", "checkpoint older"], chance.randrange(3)):
        targets_of(run).get(name, path.with_name("none")).unlink(missing_ok=True)
    return "ledger shortened"


def rewrite_ledger(run: Path, world: World, chance: random.Random) -> str:
    """A ledger with a perfect chain that tells another story: fewer steps, more noise, or a smaller rate."""
    del world
    path = run / "release" / "ledger.jsonl"
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    path.unlink()
    header = {name: value for name, value in entries[0]["payload"].items() if name != "format"}
    if chance.random() < 0.3:
        header["delta"] = header["delta"] / 2
    ledger = Ledger.create(path, header)
    charges = [entry["payload"] for entry in entries if entry["kind"] == "charge"]
    kept = chance.randint(1, len(charges))
    factor = chance.choice((1.0, 1.0, 1.01, 2.0)) if kept < len(charges) else chance.choice((1.01, 2.0))
    for entry in entries[1:]:
        payload = entry["payload"]
        if entry["kind"] != "charge":
            ledger.note(entry["kind"], payload)
        elif payload["step"] < kept:
            event = Event(sample_rate=payload["sample_rate"], noise_multiplier=payload["noise_multiplier"] * factor)
            ledger.charge(event, step=payload["step"], fork=payload["fork"])
    return "ledger rewritten"


def forge_certificate(run: Path, world: World, chance: random.Random) -> str:
    """A certificate that claims something else, with a manifest that fits it."""
    del world
    from dpvision.storage.files import file_sha256, json_bytes

    path, manifest = run / "release" / "certificate.json", run / "release" / "manifest.json"
    if not path.exists():
        return damage_file(run, World({}, {}, {}), chance)
    values: dict[str, Any] = json.loads(path.read_bytes())
    name = chance.choice([claim for claim in CLAIMS if claim in values])
    old = values[name]
    values[name] = old * chance.uniform(0.1, 0.99) if isinstance(old, float) else chance.choice([0, "x", [], "0" * 64])
    path.write_bytes(json_bytes(values))
    hashes = json.loads(manifest.read_bytes())
    hashes[path.name] = file_sha256(path)
    manifest.write_bytes(json_bytes(hashes))
    return "certificate forged"


DAMAGES: tuple[tuple[int, Callable[[Path, World, random.Random], str]], ...] = (
    (60, damage_file),
    (8, delete_files),
    (12, roll_back),
    (8, shorten_ledger),
    (6, rewrite_ledger),
    (6, forge_certificate),
)


# ---- what comes of it


def outcome_of(run: Path, world: World, *, state: str) -> str:
    """named, refused or harmless; or what went wrong."""
    from dpvision.release.verify import verify

    try:
        found = verify(run).problems
        named = not set(_named(found, run)) <= world.problems[state]
    except DPVisionError:
        named = True
    if named and state == "finished":
        return "named"
    made = [content_of(world.states[name] / "release") for name in ("finished", "stopped")]
    if not named and state != "killed" and content_of(run / "release") not in made:
        return "FAILED: a release that was changed passes for whole"
    try:
        _resume(run)
    except DPVisionError as error:
        return "named" if named else "refused" if "\n" not in str(error) else f"FAILED: not one line: {error}"
    if end_of(run) == world.ends[state]:
        return "named" if named else "harmless"
    return "FAILED: resumed to another end without a word"


def tamper(world: World, folder: Path, *, cases: int, seed: int = 0, say: Callable[[str], None] = print) -> Tally:
    """So many random cases, each in a copy below ``folder``."""
    tally = Tally()
    weights, damages = zip(*DAMAGES, strict=True)
    run = folder / "case"
    for case in range(cases):
        chance = random.Random(f"{seed}/{case}")  # noqa: S311 - damage, not secrets
        state = chance.choices(sorted(world.states), weights=(8, 1, 1))[0]
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(world.states[state], run)
        what = "?"
        try:
            what = chance.choices(damages, weights=weights)[0](run, world, chance)
            outcome = "the same bytes" if _same_tree(run, world.states[state]) else outcome_of(run, world, state=state)
        except Exception as error:  # noqa: BLE001 - a traceback is what we look for
            outcome = f"FAILED: {type(error).__name__}: {error}"
        if outcome.startswith("FAILED"):
            tally.failures.append(f"case {seed}/{case}, {state}, {what}: {outcome}")
            say(tally.failures[-1])
            outcome = "FAILED"
        tally.outcomes[what, outcome] += 1
        if (case + 1) % 1000 == 0:
            say(f"{case + 1} cases, {len(tally.failures)} failures")
    return tally


def _same_tree(one: Path, other: Path) -> bool:
    """Whether nothing was changed at all, as when a line was swapped with itself."""
    return content_of(one) == content_of(other)


def content_of(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def main() -> int:
    """Run the cases and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are made; a new folder if not given")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    world = make_world(folder)
    tally = tamper(world, folder, cases=arguments.cases, seed=arguments.seed, say=lambda text: print(text, flush=True))
    outcomes = ("named", "refused", "harmless", "the same bytes", "FAILED")
    print(f"{'damaged':28}" + "".join(f"{outcome:>16}" for outcome in outcomes))
    for what in sorted({what for what, _ in tally.outcomes}):
        print(f"{what:28}" + "".join(f"{tally.outcomes[what, outcome]:16}" for outcome in outcomes))
    print(f"{'all':28}" + "".join(f"{tally.total(outcome):16}" for outcome in outcomes))
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
