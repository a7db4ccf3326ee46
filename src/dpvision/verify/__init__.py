"""Checks a release against itself: every hash, every figure, every statement. Needs neither torch nor the data.

What this shows: the files belong together, nothing was changed since they were written, and the ledger's charges
cost what the certificate says; with a signature, also whose release it is. What it can't show: that the program which
wrote them told the truth.
"""

from __future__ import annotations

from dpvision.verify.check import Verification, require_verified, sign_release, verify
from dpvision.verify.claims import MAY_CLAIM_LESS, MAY_CLAIM_MORE

__all__ = ["MAY_CLAIM_LESS", "MAY_CLAIM_MORE", "Verification", "require_verified", "sign_release", "verify"]
