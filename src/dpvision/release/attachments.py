"""Files that belong to a certificate without being part of the run, such as an audit."""

from __future__ import annotations

from pathlib import Path

from dpvision.errors import ArgumentError
from dpvision.release.build import with_attachment
from dpvision.release.certificate_page import render_certificate_page
from dpvision.release.verify import require_verified
from dpvision.storage.files import read_file, sha256_hex
from dpvision.storage.run_folder import CERTIFICATE_PAGE, RunFolder

LARGEST = 64 * 2**20


def attach(run: Path, file: Path) -> Path:
    """Copy ``file`` into the release of a run, and let its certificate and manifest name it. Returns the copy's path.

    Only what may be given away: nothing here looks at what the file says. The run must be in order and not be signed,
    and the certificate goes on to claim what it claimed.
    """
    if not (run / "private").is_dir():
        raise ArgumentError(f"{run} must be a run folder with its private/: only the owner of a run attaches files.")
    if file.resolve().is_relative_to((run / "private").resolve()):
        raise ArgumentError(f"{file} lies in private/, from which nothing is released.")
    content = read_file(file, limit=LARGEST)
    with RunFolder.open(run) as folder:
        folder.lock()  # from here on nobody else lets the run go on under a certificate that was checked
        certificate, _ = require_verified(run)
        named = with_attachment(certificate.model_dump(), name=file.name, sha256=sha256_hex(content))
        folder.attach(file.name, content, certificate=named, pages={CERTIFICATE_PAGE: render_certificate_page(named)})
        return folder.release / file.name
