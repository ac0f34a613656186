"""Shows the doctests at the end of a docstring as code; the parser knows them only by a heading."""

import re
from typing import Any

import griffe

LAST = re.compile(r"^(?=>>> )", re.M)


class Doctests(griffe.Extension):
    """Puts `Examples:` above the first doctest that stands alone."""

    def on_object(self, *, obj: griffe.Object, **rest: Any) -> None:
        """Called for each module, class, function and attribute that was read."""
        if obj.docstring is not None:
            before, *after = LAST.split(obj.docstring.value, maxsplit=1)
            if after:
                code = "".join(f"    {line}\n" for line in after[0].splitlines())
                obj.docstring.value = f"{before}Examples:\n{code}"
