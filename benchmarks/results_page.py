"""Write generated sections of docs/results.md, from `<!-- NAME: COMMAND -->` to `<!-- end -->`."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "results.md"


def with_section(name: str, section: str, page: str) -> str:
    """Return the text of the page with the named section replaced.

    Raises:
        ValueError: If the page does not have exactly one section of this name.
    """
    pattern = re.compile(rf"(<!-- {name}: [^\n]+ -->\n\n).*?(\n<!-- end -->)", re.S)
    text, n = pattern.subn(lambda match: match[1] + section + match[2], page)
    if n != 1:
        raise ValueError(f"{PAGE} has {n} sections named {name!r}, expected 1")
    return text


def write_section(name: str, section: str) -> None:
    """Replace the named section of docs/results.md."""
    PAGE.write_text(with_section(name, section, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
