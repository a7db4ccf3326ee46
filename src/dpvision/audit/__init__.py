"""Audits: attempts to refute a guarantee.

``canaries`` trains once with planted units and bounds epsilon from below; ``membership`` attacks a finished run;
``reconstruction`` shows an image that a model reveals;
``mechanism_check`` tests the step path (draw, clip, charge, noise); ``bounds`` has the statistics; ``findings`` writes
the results as documents. ``audited_runs`` moves the settings of a run, recipe or model onto synthetic images.
"""

from __future__ import annotations

from dpvision.audit.audited_runs import Subject, config_of_model, subject_of_config, subject_of_run
from dpvision.audit.canaries import CanaryAudit, audit_with_canaries
from dpvision.audit.findings import (
    AUDIT_FILE,
    attach_audits,
    canary_document,
    keep_private,
    mechanism_document,
    membership_document,
)
from dpvision.audit.mechanism_check import Check, check_mechanism
from dpvision.audit.membership import MembershipAudit, loss_attack, shadow_attack, sides_of
from dpvision.audit.reconstruction import (
    Reconstruction,
    ReconstructionPlan,
    reconstruct,
    reconstruction_bound,
    reconstruction_chart,
    reconstruction_document,
)

__all__ = [
    "AUDIT_FILE",
    "CanaryAudit",
    "Check",
    "MembershipAudit",
    "Reconstruction",
    "ReconstructionPlan",
    "Subject",
    "attach_audits",
    "audit_with_canaries",
    "canary_document",
    "check_mechanism",
    "config_of_model",
    "keep_private",
    "loss_attack",
    "mechanism_document",
    "membership_document",
    "reconstruct",
    "reconstruction_bound",
    "reconstruction_chart",
    "reconstruction_document",
    "shadow_attack",
    "sides_of",
    "subject_of_config",
    "subject_of_run",
]
