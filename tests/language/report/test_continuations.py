"""Continuations in the terminal: the first prompts, each with the text of every model."""

import pytest

pytest.importorskip("transformers")

from ssl_kd.language.report.tables import SHOWN_CHARACTERS, continuations  # noqa: E402


def test_continuations_show_each_model_below_its_prompt():
    texts = {"prompt": "Once", "reference": " more", "teacher": " upon", "before": "\x1b[2J\nx"}
    shown = continuations({"generations": [texts | {"after": "y" * (SHOWN_CHARACTERS + 1)}] * 4})
    blocks = shown.plain.split("\n\n")
    assert blocks[0].splitlines() == [
        "prompt   Once",
        "teacher   upon",
        r"before   \x1b[2J\nx",  # no terminal code and no line break comes from a model
        f"student  {'y' * SHOWN_CHARACTERS}…",
    ]
    assert blocks[1:] == [blocks[0], blocks[0], ""]


def test_without_a_teacher_its_line_is_missing():
    shown = continuations({"generations": [{"prompt": "a", "before": "b", "after": "c"}]})
    assert [line.split()[0] for line in shown.plain.splitlines() if line] == [
        *("prompt", "before", "student")
    ]
    assert not continuations({"generations": []})
