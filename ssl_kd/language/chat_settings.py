"""Declare the settings of records: chat template, what is trained on, and the teacher of each."""

from __future__ import annotations

from dataclasses import dataclass

from ssl_kd.settings import Settings, setting


@dataclass(frozen=True)
class ChatSettings(Settings):
    """Choose the chat template, whether reasoning is trained on, and the teacher of a record."""

    learn_thoughts: bool = setting(
        True, "train on the reasoning in assistant turns; off: on their answers and tool calls only"
    )
    chat_template_path: str | None = setting(
        None,
        "chat template, saved with the student: a .jinja file, or a model (folder or name on the"
        " Hub) that has it; None: the tokenizer's own",
    )
    chat_template_kwargs: dict | None = setting(
        None,
        'variables of the chat template, as JSON: {"enable_thinking": false}; None: its defaults',
    )
    teacher_field: str | None = setting(
        None,
        "field with the tag of the teacher that a record is learned from, as in TEACHER_MODEL"
        ' "math=A, code=B"; None: from all teachers',
    )
