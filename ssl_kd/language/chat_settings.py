"""Declare the settings of chat messages: their template, and what is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from ssl_kd.settings import Settings, setting


@dataclass(frozen=True)
class ChatSettings(Settings):
    """Choose the chat template, and whether reasoning is trained on."""

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
