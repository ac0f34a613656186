"""The settings of the language mode as keyword arguments that an editor knows.

    python -m tests.language.keywords > ssl_kd/language/keywords.py

A type checker cannot see through the fields of a dataclass to the arguments of another class, so
`ssl_kd/language/keywords.py` is written from them; a test says when it is out of date.
"""

import dataclasses

from ssl_kd.language.settings import LanguageSettings

OWN = {"teacher_model", "student_model", "data_path", "eval_path"}  # arguments of `Distillation`
HEAD = '''"""The settings of `scripts/config.py` as keyword arguments, each with its type.

Written by `python -m tests.language.keywords`; meaning and range are those of `LanguageSettings`.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class Keywords(TypedDict, total=False):
    """What `Distillation` takes beside teacher, student and texts."""

'''


def kind(field: dataclasses.Field) -> str:
    """The type of a setting; of one that is a choice of words, these."""
    rule = field.metadata["rule"]
    if not rule.choices or rule.forms or "str" not in str(field.type):
        return str(field.type)
    words = ", ".join(f'"{word}"' for word in rule.choices)
    return f"Literal[{words}]" + (" | None" if "None" in str(field.type) else "")


def text() -> str:
    """The module."""
    fields = sorted(dataclasses.fields(LanguageSettings), key=lambda field: field.name)
    lines = [f"    {field.name}: {kind(field)}" for field in fields if field.name not in OWN]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(text(), end="")
