"""The breakages that ``tools.mutants`` applies: each makes a printed epsilon false, and some test must notice."""

from __future__ import annotations

from tools.mutations.accounting import ACCOUNTING
from tools.mutations.analyze import ANALYZE
from tools.mutations.audit import AUDIT
from tools.mutations.clipping import CLIPPING
from tools.mutations.compat import COMPAT
from tools.mutations.fast import FAST
from tools.mutations.faults import FAULTS
from tools.mutations.gradients import GRADIENTS
from tools.mutations.hostile import HOSTILE
from tools.mutations.inputs import INPUTS
from tools.mutations.masks import MASKS
from tools.mutations.mutation import Mutation
from tools.mutations.native import NATIVE
from tools.mutations.own_code import OWN_CODE
from tools.mutations.private_run import PRIVATE_RUN
from tools.mutations.ranks import RANKS
from tools.mutations.records import LEDGER
from tools.mutations.reproduce import REPRODUCE
from tools.mutations.search import SEARCH
from tools.mutations.separability import SEPARABILITY
from tools.mutations.step import DATA, NOISE, OPTIMIZERS
from tools.mutations.training import TRAINING
from tools.mutations.transfer import TRANSFER
from tools.mutations.trust import TRUST
from tools.mutations.views import VIEWS

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS: tuple[Mutation, ...] = (
    *NOISE,
    *OPTIMIZERS,
    *DATA,
    *ACCOUNTING,
    *GRADIENTS,
    *CLIPPING,
    *FAST,
    *NATIVE,
    *LEDGER,
    *TRAINING,
    *TRANSFER,
    *TRUST,
    *OWN_CODE,
    *PRIVATE_RUN,
    *COMPAT,
    *SEPARABILITY,
    *VIEWS,
    *MASKS,
    *INPUTS,
    *FAULTS,
    *HOSTILE,
    *REPRODUCE,
    *AUDIT,
    *ANALYZE,
    *SEARCH,
    *RANKS,
)
