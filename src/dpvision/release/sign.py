"""Ed25519 signatures of releases: keys, and the content of signature.json.

The signed bytes are those of manifest.json, which has the hash of every other file of the release. Without a signature,
someone who rewrites ledger, certificate and manifest together leaves a release that is consistent with itself. amend.py
signs a release, verify.py checks its signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dpvision.errors import ArgumentError, TamperError
from dpvision.storage.files import disk_errors, json_bytes, parse_object, read_file, sha256_hex, write_atomically

FORMAT = 1
ALGORITHM = "ed25519"
PASSWORD_VARIABLE = "DPVISION_KEY_PASSWORD"  # noqa: S105 (the name of a variable)
_CONTEXT = b"dpvision release manifest, signature format 1\n"
_FIELDS = {"format", "algorithm", "public_key", "manifest_sha256", "signature"}
_LARGEST_KEY = 2**16


@final
@dataclass(frozen=True)
class Signature:
    """A signature that fits a manifest, and the key that made it."""

    public_key: bytes

    @property
    def fingerprint(self) -> str:
        """A short name of the key, to be compared with what its owner says."""
        return fingerprint(self.public_key)


def fingerprint(public_key: bytes) -> str:
    """Return the SHA-256 of a public key, in hex: a short name to compare with what its owner publishes."""
    return f"SHA256:{hashlib.sha256(public_key).hexdigest()}"


def make_keys(path: Path, *, password: bytes | None = None) -> tuple[Path, str]:
    """Write a new private key, readable by its owner only, and its public key beside it.

    Args:
        path: Where to write the private key, in PEM; the public key becomes ``path``.pub.
        password: Encrypts the private key; None for a key without password.

    Returns:
        The path of the public key, and its fingerprint.

    Raises:
        ArgumentError: One of the files exists already (nothing is overwritten), the folder does not exist, or the
            password is empty.
    """
    if not path.name:
        raise ArgumentError(f"the key needs the name of a file, got {path}.")
    public_path = path.with_name(f"{path.name}.pub")
    for taken in (path, public_path):
        if taken.exists() or taken.is_symlink():
            raise ArgumentError(f"{taken} exists already: a key is never overwritten. Choose another name.")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"the folder of {path} must exist.")
    if password == b"":
        raise ArgumentError("the password must not be empty. Leave it out for a key without one.")
    key = Ed25519PrivateKey.generate()
    secret = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    with disk_errors(f"write {path}"):
        write_atomically(path, private, mode=0o600)
        write_atomically(public_path, public)
    return public_path, fingerprint(key.public_key().public_bytes_raw())


def load_private_key(path: Path, *, ask_password: Callable[[], str]) -> Ed25519PrivateKey:
    """Read a private key.

    Args:
        path: A file in PEM, as ``dpvision keygen`` writes it.
        ask_password: Called only if the key is encrypted; returns its password.

    Returns:
        The key.

    Raises:
        ArgumentError: The file is not an Ed25519 key in PEM, or the password is wrong.
    """
    content = read_file(path, limit=_LARGEST_KEY)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except TypeError:  # how the library says that the key is encrypted
        key = _decrypted(content, ask_password(), path)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ArgumentError(f"{path} must be a private key in PEM, as dpvision keygen writes it.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ArgumentError(f"{path} must be an Ed25519 key. Make one with dpvision keygen.")
    return key


def _decrypted(content: bytes, password: str, path: Path) -> object:
    """The private key that the password opens."""
    try:
        return serialization.load_pem_private_key(content, password=password.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ArgumentError(f"the password does not open {path}.") from error


def load_public_key(path: Path) -> bytes:
    """Read a public key.

    Args:
        path: The .pub file that ``dpvision keygen`` writes.

    Returns:
        The 32 bytes of the key.

    Raises:
        ArgumentError: The file is not an Ed25519 public key in PEM.
    """
    content = read_file(path, limit=_LARGEST_KEY)
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ArgumentError(f"{path} must be a public key in PEM: the .pub that dpvision keygen writes.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ArgumentError(f"{path} must be an Ed25519 key, such as dpvision keygen makes.")
    return key.public_bytes_raw()


def signature_bytes(manifest: bytes, key: Ed25519PrivateKey) -> bytes:
    """Return the content of signature.json for the bytes of a manifest."""
    return json_bytes(
        {
            "format": FORMAT,
            "algorithm": ALGORITHM,
            "public_key": key.public_key().public_bytes_raw().hex(),
            "manifest_sha256": sha256_hex(manifest),
            "signature": key.sign(_CONTEXT + manifest).hex(),
        }
    )


def checked_signature(content: bytes, manifest: bytes, *, name: str) -> Signature:
    """Check a signature.

    Args:
        content: The bytes of signature.json.
        manifest: The bytes of manifest.json.
        name: The name of the file, for messages.

    Returns:
        The signature, with the key that made it.

    Raises:
        TamperError: It is not a signature that dpvision writes, is of another manifest, or was forged.

    Guarantee:
        The signer had the private key, and signed exactly these bytes.
    """
    values = parse_object(content, name=name)
    try:
        public_key, signature = _parsed(values)
    except (TypeError, ValueError) as error:
        raise TamperError(f"{name} is not a signature that dpvision writes.") from error
    if values["manifest_sha256"] != sha256_hex(manifest):
        raise TamperError(f"{name} is of another manifest: a file was changed after the release was signed.")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _CONTEXT + manifest)
    except (InvalidSignature, ValueError) as error:
        raise TamperError(f"{name} does not fit the manifest: one of the two was forged.") from error
    return Signature(public_key)


def _parsed(values: dict[str, Any]) -> tuple[bytes, bytes]:
    """Public key and signature; ``ValueError`` unless the values are exactly as they are written."""
    if values.keys() != _FIELDS or values["format"] != FORMAT or values["algorithm"] != ALGORITHM:
        raise ValueError("unknown layout")
    public_key, signature = bytes.fromhex(values["public_key"]), bytes.fromhex(values["signature"])
    if public_key.hex() != values["public_key"] or signature.hex() != values["signature"] or len(public_key) != 32:
        raise ValueError("unusual hexadecimal")
    return public_key, signature
