"""Whose release it is, and files that belong to it: signatures and attachments (PITFALLS 29, 30)."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from test_verify import finish, make_run
from typer.testing import CliRunner

from dpvision.cli import app
from dpvision.errors import ArgumentError, DPVisionError, TamperError
from dpvision.privacy.randomness import Keys
from dpvision.release import amend
from dpvision.release.amend import attach, sign_release
from dpvision.release.sign import checked_signature, fingerprint, load_private_key, load_public_key, make_keys
from dpvision.release.verify import verify
from dpvision.storage.files import json_bytes, sha256_hex
from dpvision.storage.run_folder import RunFolder


def no_password() -> str:
    raise AssertionError("no password should be asked for")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("signed")
    with make_run(place / "run", keys=Keys.from_os_entropy()) as folder:
        finish(folder)
    make_keys(place / "own")
    make_keys(place / "other")
    return place


@pytest.fixture
def place(prepared: Path, tmp_path: Path) -> Path:
    """A finished run, a key of its own and somebody else's."""
    shutil.copytree(prepared, tmp_path / "place")
    return tmp_path / "place"


def sign(place: Path, key: str = "own") -> None:
    sign_release(place / "run", place / key, ask_password=no_password)


def own_key(place: Path) -> bytes:
    return load_public_key(place / "own.pub")


def test_a_signed_release_names_its_signer(place: Path) -> None:
    assert verify(place / "run").signed_by is None
    sign(place)
    for path in (place / "run", place / "run" / "release"):
        found = verify(path)
        assert (found.ok, found.signed_by, found.signer_is_known) == (True, fingerprint(own_key(place)), False)
        found = verify(path, key=own_key(place))
        assert (found.ok, found.signer_is_known) == (True, True)


def test_a_key_that_was_asked_for_must_have_signed(place: Path) -> None:
    assert "it has no signature" in verify(place / "run", key=own_key(place)).problems[0]
    sign(place, "other")
    assert verify(place / "run").ok
    assert "by another key" in verify(place / "run", key=own_key(place)).problems[0]
    certificate = place / "alone" / "certificate.json"
    certificate.parent.mkdir()
    for name in ("certificate.json", "ledger.jsonl"):
        shutil.copy(place / "run" / "release" / name, certificate.parent)
    assert "a certificate alone has none" in verify(certificate, key=own_key(place)).problems[0]


def forge(run: Path) -> None:
    """Take three steps off the ledger, and make certificate and manifest anew, as only a liar would."""
    folder = RunFolder.open(run)
    kept = (run / "release" / "signature.json").read_bytes() if (run / "release" / "signature.json").exists() else None
    folder.ledger_path.write_bytes(b"".join(folder.ledger_path.read_bytes().splitlines(keepends=True)[:5]))
    finish(folder)
    shutil.rmtree(run / "private")
    if kept is not None:
        (run / "release" / "signature.json").write_bytes(kept)


def test_rewriting_everything_together_passes_without_a_signature_and_fails_with_one(place: Path) -> None:
    shutil.copytree(place / "run", place / "unsigned")
    forge(place / "unsigned")
    assert verify(place / "unsigned").ok  # known: hashes alone can't tell
    assert not verify(place / "unsigned", key=own_key(place)).ok
    sign(place)
    forge(place / "run")
    problems = verify(place / "run").problems
    assert len(problems) == 1
    assert "signature.json is of another manifest" in problems[0]


def test_a_forger_who_signs_anew_is_caught_by_the_key(place: Path) -> None:
    sign(place)
    forge(place / "run")
    (place / "run" / "release" / "signature.json").unlink()
    sign(place, "other")
    assert verify(place / "run").ok
    assert not verify(place / "run", key=own_key(place)).ok


def test_any_change_of_any_file_of_a_signed_release_is_named(place: Path) -> None:
    sign(place)
    for path in sorted((place / "run" / "release").iterdir()):
        content = path.read_bytes()
        for changed in (content[:-1], content[:10] + bytes([content[10] ^ 1]) + content[11:], content + b" ", b""):
            path.write_bytes(changed)
            assert any(path.stem in problem for problem in verify(place / "run").problems), path
        path.write_bytes(content)
        path.unlink()
        assert verify(place / "run").ok == (path.name == "signature.json")
        assert not verify(place / "run", key=own_key(place)).ok
        path.write_bytes(content)
    assert verify(place / "run", key=own_key(place)).ok


@pytest.mark.parametrize(
    "change",
    [
        {"signature": "00" * 64},
        {"signature": "zz"},
        {"signature": 5},
        {"public_key": "00" * 32},
        {"public_key": "ff" * 32},
        {"public_key": "ab"},
        {"algorithm": "none"},
        {"format": 2},
        {"manifest_sha256": "0" * 64},
        {"more": 1},
    ],
)
def test_a_broken_signature_is_named(place: Path, change: dict[str, Any]) -> None:
    sign(place)
    path = place / "run" / "release" / "signature.json"
    path.write_bytes(json_bytes({**json.loads(path.read_bytes()), **change}))
    assert any("signature.json" in problem for problem in verify(place / "run").problems)


@pytest.mark.parametrize("content", [b"", b"null", b"[1]", b"\xff\x00", b"{}", b"[" * 100_000])
def test_any_bytes_in_place_of_a_signature_are_named(place: Path, content: bytes) -> None:
    (place / "run" / "release" / "signature.json").write_bytes(content)
    assert any("signature.json" in problem for problem in verify(place / "run").problems)


def test_a_release_that_is_not_in_order_is_not_signed(place: Path) -> None:
    (place / "run" / "release" / "metrics.json").write_bytes(b"{}")
    with pytest.raises(TamperError, match=r"metrics\.json"):
        sign(place)
    assert not (place / "run" / "release" / "signature.json").exists()


def test_what_is_signed_are_the_bytes_that_were_checked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, examine = place / "run" / "release", amend.examine

    def then_swapped(path: Path) -> Any:
        """Somebody puts other weights and a manifest that names them into the release, right after the check."""
        examined = examine(path)
        (release / "weights.safetensors").write_bytes(b"others")
        hashes = json.loads((release / "manifest.json").read_bytes())
        hashes["weights.safetensors"] = sha256_hex(b"others")
        (release / "manifest.json").write_bytes(json_bytes(hashes))
        return examined

    checked = (release / "manifest.json").read_bytes()
    monkeypatch.setattr(amend, "examine", then_swapped)
    sign(place)
    monkeypatch.undo()
    assert "signature.json is of another manifest" in verify(place / "run", key=own_key(place)).problems[0]
    checked_signature((release / "signature.json").read_bytes(), checked, name="signature.json")


def test_a_certificate_alone_is_not_signed(place: Path) -> None:
    (place / "alone").mkdir()
    for name in ("certificate.json", "ledger.jsonl"):
        shutil.copy(place / "run" / "release" / name, place / "alone")
    with pytest.raises(ArgumentError, match="a certificate alone can't be signed"):
        sign_release(place / "alone" / "certificate.json", place / "own", ask_password=no_password)
    assert not (place / "alone" / "signature.json").exists()


def test_nothing_is_attached_to_a_run_that_somebody_else_is_writing(place: Path) -> None:
    (place / "audit.json").write_bytes(b"{}")
    with RunFolder.open(place / "run") as folder:
        folder.lock()
        with pytest.raises(DPVisionError, match="in use by process"):
            attach(place / "run", place / "audit.json")
    attach(place / "run", place / "audit.json")


def test_a_release_away_from_its_run_can_be_signed(place: Path) -> None:
    shutil.move(place / "run" / "release", place / "model")
    sign_release(place / "model", place / "own", ask_password=no_password)
    assert verify(place / "model", key=own_key(place)).ok
    assert not (place / "private").exists()


def test_nothing_is_added_to_a_signed_release_and_a_new_release_has_no_old_signature(place: Path) -> None:
    sign(place)
    with RunFolder.open(place / "run") as folder:
        with pytest.raises(ArgumentError, match="is signed"):
            folder.add_to_release("report.html", b"new")
        assert verify(place / "run", key=own_key(place)).ok
        folder.withdraw_release()
        assert not (place / "run" / "release" / "signature.json").exists()


def test_a_private_key_is_for_its_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    public, name = make_keys(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert fingerprint(load_public_key(public)) == name
    before = (tmp_path / "key").read_bytes()
    with pytest.raises(ArgumentError, match="never overwritten"):
        make_keys(tmp_path / "key")
    (tmp_path / "key").unlink()
    with pytest.raises(ArgumentError, match="never overwritten"):
        make_keys(tmp_path / "key")
    assert not (tmp_path / "key").exists()
    assert b"PRIVATE" in before
    with pytest.raises(ArgumentError, match="folder"):
        make_keys(tmp_path / "nowhere" / "key")
    with pytest.raises(ArgumentError, match="empty"):
        make_keys(tmp_path / "third", password=b"")


def test_an_encrypted_key_needs_its_password(tmp_path: Path) -> None:
    make_keys(tmp_path / "key", password=b"long and secret")
    assert b"ENCRYPTED" in (tmp_path / "key").read_bytes()
    load_private_key(tmp_path / "key", ask_password=lambda: "long and secret")
    with pytest.raises(ArgumentError, match="password does not open"):
        load_private_key(tmp_path / "key", ask_password=lambda: "wrong")


def test_other_files_in_place_of_keys_are_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    curve = generate_private_key(SECP256R1())
    (tmp_path / "curve").write_bytes(
        curve.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "curve.pub").write_bytes(
        curve.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / "text").write_bytes(b"hello")
    for name in ("text", "key.pub", "curve", "missing"):
        with pytest.raises(DPVisionError):
            load_private_key(tmp_path / name, ask_password=no_password)
    for name in ("text", "key", "curve.pub", "missing"):
        with pytest.raises(DPVisionError):
            load_public_key(tmp_path / name)


def test_an_attachment_is_named_by_certificate_and_manifest(place: Path) -> None:
    (place / "audit.json").write_bytes(b'{"epsilon_lower": 0.3}\n')
    before = json.loads((place / "run" / "release" / "certificate.json").read_bytes())
    path = attach(place / "run", place / "audit.json")
    after = json.loads((place / "run" / "release" / "certificate.json").read_bytes())
    assert after.pop("attachments") == [{"name": "audit.json", "sha256": sha256_hex(b'{"epsilon_lower": 0.3}\n')}]
    assert before.pop("attachments") == []
    assert before == after
    assert "audit.json" in (place / "run" / "release" / "certificate.md").read_text()
    assert verify(place / "run").ok
    assert path.read_bytes() == b'{"epsilon_lower": 0.3}\n'
    (place / "audit.json").write_bytes(b"again")
    attach(place / "run", place / "audit.json")
    assert verify(place / "run").ok
    path.write_bytes(b"other")
    assert any("not the attachment" in problem for problem in verify(place / "run").problems)
    path.unlink()
    assert any("names this attachment" in problem for problem in verify(place / "run").problems)


def test_a_signed_release_inside_another_does_not_vouch_for_it(place: Path) -> None:
    sign(place)
    shutil.copytree(place / "run" / "release", place / "forged")
    shutil.copytree(place / "run" / "release", place / "forged" / "release")
    (place / "forged" / "weights.safetensors").write_bytes(b"others")
    with pytest.raises(TamperError, match="name the one that you mean"):
        verify(place / "forged", key=own_key(place))


def test_nothing_that_speaks_of_an_old_certificate_is_vouched_for_by_a_new_one(place: Path) -> None:
    (place / "audit.json").write_bytes(b"{}")
    attach(place / "run", place / "audit.json")
    with RunFolder.open(place / "run") as folder:
        folder.add_to_release("report.html", b"epsilon 0.1")
        folder.withdraw_release()
        left = {path.name for path in folder.release.iterdir()}
    assert left <= {"ledger.jsonl", "config.json", "weights.safetensors", "metrics.json"}


def test_nothing_private_is_attached(place: Path) -> None:
    with pytest.raises(ArgumentError, match="lies in private"):
        attach(place / "run", place / "run" / "private" / "key.json")


def test_an_attachment_is_refused_where_it_can_not_be(place: Path) -> None:
    for name in ("certificate.json", "weights.safetensors", "signature.json", "model_card.md", ".hidden", "a b"):
        (place / name).write_bytes(b"x")
        with pytest.raises(DPVisionError):
            attach(place / "run", place / name)
    (place / "audit.json").write_bytes(b"{}")
    sign(place)
    with pytest.raises(ArgumentError, match="is signed"):
        attach(place / "run", place / "audit.json")
    (place / "run" / "release" / "signature.json").unlink()
    (place / "run" / "release" / "metrics.json").write_bytes(b"{}")
    with pytest.raises(TamperError):
        attach(place / "run", place / "audit.json")
    shutil.rmtree(place / "run" / "private")
    with pytest.raises(ArgumentError, match="only the owner"):
        attach(place / "run", place / "audit.json")
    assert not (place / "run" / "release" / "audit.json").exists()


def command(*arguments: str, opened_by: str = "") -> Any:
    return CliRunner().invoke(app, list(arguments), env={"DPVISION_KEY_PASSWORD": opened_by} if opened_by else {})


def test_the_commands_make_keys_sign_and_verify(place: Path) -> None:
    key, run = str(place / "new"), str(place / "run")
    made = command("keygen", key, "--password", "--json", opened_by="s3cret")
    assert made.exit_code == 0
    name = json.loads(made.stdout)["fingerprint"]
    assert command("keygen", key).exit_code == 2
    assert command("sign", run, "--key", key, opened_by="wrong").exit_code == 2
    signed = command("sign", run, "--key", key, opened_by="s3cret")
    assert signed.exit_code == 0
    assert name in signed.stdout
    assert "an unknown key" in command("verify", run).stdout
    assert "the given key" in command("verify", run, "--key", f"{key}.pub").stdout
    other = command("verify", run, "--key", str(place / "other.pub"))
    assert other.exit_code == 1
    assert command("verify", run, "--key", key).exit_code == 2
    assert command("sign", str(place / "nothing"), "--key", str(place / "own")).exit_code == 2
    assert "s3cret" not in (signed.stdout + made.stdout)


def test_a_signature_is_checked_without_torch(place: Path) -> None:
    sign(place)
    code = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is not here")
sys.meta_path.insert(0, NoTorch())
from pathlib import Path
from dpvision.release.sign import load_public_key
from dpvision.release.verify import verify
found = verify(Path(sys.argv[1]), key=load_public_key(Path(sys.argv[2])))
assert found.ok and found.signer_is_known, found
assert "torch" not in sys.modules
"""
    arguments = [sys.executable, "-c", code, str(place / "run" / "release"), str(place / "own.pub")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_key_without_a_file_name_is_refused() -> None:
    result = CliRunner().invoke(app, ["keygen", ""])
    assert result.exit_code == 2
    assert "needs the name of a file" in result.stderr
