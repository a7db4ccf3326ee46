"""Every example in docs/concepts/engine.md runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "engine.md"


def test_the_examples_of_the_engine_page_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "engine_page"})  # noqa: S102
