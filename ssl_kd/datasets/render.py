"""The text of an example as a tokenizer gets it, and which stretches of it are to be learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ssl_kd.datasets.records import Example
from ssl_kd.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Rendered:
    """A string, and the spans of it that count: (begin, end, characters of the text itself)."""

    text: str
    spans: tuple[tuple[int, int, int], ...]


def render(
    example: Example, tokenizer: PreTrainedTokenizerFast, template: str | None = None
) -> Rendered | str:
    """The text of an example, or why there is none; `template`: one that is not the tokenizer's."""
    if example.messages is not None:
        return _render_chat(example, example.messages, tokenizer, template)
    if example.text is not None:
        return Rendered(example.text, ((0, len(example.text), len(example.text)),))
    prompt, completion = example.prompt or "", example.completion or ""
    whole = prompt + completion
    return Rendered(whole, ((len(prompt), len(whole), len(completion)),))


def _render_chat(
    example: Example,
    messages: Sequence[Any],
    tokenizer: PreTrainedTokenizerFast,
    template: str | None,
) -> Rendered | str:
    from jinja2 import TemplateError

    where, tools = example.where, list(example.tools) if example.tools else None
    shown: Any = template or tokenizer.chat_template
    if shown is None:
        raise InputError(
            f"{where}: messages need a chat template, and the tokenizer "
            f"{tokenizer.name_or_path!r} has none: take the tokenizer of a chat model, set "
            "tokenizer.chat_template, or write the data as prompt and completion"
        )

    def render(upto: int, prompt: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(
                list(messages[:upto]),
                tools=tools,
                chat_template=shown,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        )

    spans = []
    try:
        whole = render(len(messages))
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and i >= example.given:
                before, after = render(i, prompt=True) if i else "", render(i + 1)
                # A template that rewrites earlier turns (drops thoughts, say) hides where they are.
                if whole.startswith(before) and whole.startswith(after):
                    calls = [call["function"] for call in message.get("tool_calls", ())]
                    if any(call["name"] not in after[len(before) :] for call in calls):
                        return f"{where}: the chat template does not show the tool calls"
                    said = len(_written(message["content"])) + sum(
                        len(json.dumps(call)) for call in calls
                    )
                    spans.append((len(before), len(after), said))
    except TemplateError as error:
        return f"{where}: the chat template refuses the messages: {error}"
    if not spans:
        return f"{where}: the chat template shows no turn of the assistant as it was generated"
    return Rendered(whole, tuple(spans))


def _written(content: Any) -> str:
    """The text of a message's content, which may be in parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
