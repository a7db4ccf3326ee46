"""Models and losses that could make the clipped sum depend on one unit by more than its own clipped gradient.

Every case must be refused, or its sum must be exact and separable (``separability_oracle`` decides). Some are honest
code in a form that is hard to follow; they stand beside a hostile twin of the same form, and their reason begins with
"honest".
"""

from __future__ import annotations

import hostile_autograd  # noqa: F401 - importing fills the table
import hostile_branches  # noqa: F401
import hostile_layers  # noqa: F401
import hostile_losses  # noqa: F401
import hostile_memory  # noqa: F401
import hostile_rows  # noqa: F401
import hostile_state  # noqa: F401
from hostile_table import HOSTILE

__all__ = ["HOSTILE"]
