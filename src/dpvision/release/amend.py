"""Changes to a finished release: attach a file, or sign it. Both are refused unless the release verifies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dpvision.errors import ArgumentError
from dpvision.release.build import with_attachment
from dpvision.release.certificate_page import render_certificate_page
from dpvision.release.sign import fingerprint, load_private_key, signature_bytes
from dpvision.release.verify import examine, require_verified
from dpvision.storage.files import read_file, sha256_hex
from dpvision.storage.run_folder import CERTIFICATE_PAGE, SIGNATURE, RunFolder

LARGEST_ATTACHMENT = 64 * 2**20


def attach(run: Path, file: Path) -> Path:
    """Copy a file into the release of a run; its certificate and manifest name it from then on.

    Attach only what may be published: the content of the file is not examined.

    Args:
        run: A run folder with its private/ folder. It must verify and must not be signed.
        file: A file of at most 64 MiB outside of private/.

    Returns:
        The path of the copy.

    Raises:
        ArgumentError: The run has no private/ folder, or the file lies in it.
        TamperError: The run does not verify.
    """
    if not (run / "private").is_dir():
        raise ArgumentError(f"{run} must be a run folder with its private/: only the owner of a run attaches files.")
    if file.resolve().is_relative_to((run / "private").resolve()):
        raise ArgumentError(f"{file} lies in private/, from which nothing is released.")
    content = read_file(file, limit=LARGEST_ATTACHMENT)
    with RunFolder.open(run) as folder:
        folder.lock()  # so that the run cannot be resumed while its certificate is checked and replaced
        certificate, _ = require_verified(run)
        named = with_attachment(certificate.model_dump(), name=file.name, sha256=sha256_hex(content))
        folder.attach(file.name, content, certificate=named, pages={CERTIFICATE_PAGE: render_certificate_page(named)})
        return folder.release / file.name


def sign_release(path: Path, key_file: Path, *, ask_password: Callable[[], str]) -> tuple[Path, str]:
    """Sign a release with a private key. An older signature is replaced, if it is valid.

    Args:
        path: A run folder or a release folder.
        key_file: The private key, in PEM, as ``dpvision keygen`` writes it.
        ask_password: Called if the key is encrypted; returns its password.

    Returns:
        The path of the signature and the fingerprint of the key.

    Raises:
        ArgumentError: The key cannot be read, or ``path`` is not a whole release.
        TamperError: The release does not verify.

    Guarantee:
        The signed bytes are the manifest that was verified: one that was replaced since then does not fit the
        signature.
    """
    key = load_private_key(key_file, ask_password=ask_password)
    examined = examine(path)
    examined.require_ok()
    release, manifest = examined.release, examined.manifest
    if manifest is None:
        raise ArgumentError(f"{path} must be a run or a release folder: a certificate alone can't be signed.")
    RunFolder(release.parent).write_signature(signature_bytes(manifest, key), release)
    return release / SIGNATURE, fingerprint(key.public_key().public_bytes_raw())
