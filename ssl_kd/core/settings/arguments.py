"""Rename settings in error messages to the Python arguments that a caller passed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ssl_kd.core.errors import UserError
from ssl_kd.core.settings import Settings

# A word outside quotes and paths: a setting in a file, or a flag.
_WORD = re.compile(r"""(?<![\w'"./=-])(--[a-z]\w*|[A-Z][A-Z0-9_]+)(?![\w'"./=-])""")


@contextlib.contextmanager
def named_as_arguments(cls: type[Settings], **others: str) -> Iterator[None]:
    """Rewrite errors raised inside: `n_clusters` in place of N_CLUSTERS and --n_clusters.

    `others` are arguments whose names differ from their settings': `seed="random_state"`.
    """

    def argument(word: re.Match[str]) -> str:
        name = word[0].removeprefix("--").lower()
        return others.get(name, name) if name in cls.rules() else word[0]

    try:
        yield
    except UserError as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (_WORD.sub(argument, error.args[0]),)
        raise
