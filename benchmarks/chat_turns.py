"""Turns of the assistant that are learned, of those there, under chat templates.

python -m benchmarks.chat_turns FOLDER  # of NAME.jinja, such as TRL's trl/chat_templates
python -m benchmarks.chat_turns         # the templates of the tests
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.turns import header, row
from ssl_kd.datasets.records import Example, as_example
from ssl_kd.datasets.render import render

TOOL = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


_CALL = {"id": "abcdefgh1", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
_CALLED = [
    _user("Does it rain?"),
    _assistant("", tool_calls=[_CALL]),
    {"role": "tool", "content": "no", "tool_call_id": "abcdefgh1", "name": "weather"},
    _assistant("No."),
]
CHATS = {
    "one turn": [_user("Hi"), _assistant("Hello.")],
    "several": [_user("Hi"), _assistant("No."), _user("Hi"), _assistant("No."), _user("Bye"),
                _assistant("Bye.")],
    "tools": [*_CALLED, _user("Thanks"), _assistant("Bye.")],
    "thoughts": [_user("2 + 2?"), _assistant("4", reasoning_content="two and two"),
                 _user("3 + 3?"), _assistant("6", reasoning_content="three twice")],
}  # fmt: skip


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer without a vocabulary, but with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def outcome(template: str, messages: list[dict[str, Any]]) -> str:
    """Turns learned of turns there, and what the template leaves out."""
    tools = [{"type": "function", "function": TOOL}] if "tool_calls" in messages[1] else None
    example = as_example({"messages": messages, "tools": tools}, "")
    assert isinstance(example, Example)
    rendered = render(example, tokenizer_with(template))
    turns = rendered.turns
    hidden = f", {turns['hidden']} thought hidden" if turns["hidden"] else ""
    why = rendered.left_out[0].removeprefix(": the chat template ") if rendered.left_out else ""
    return f"{turns['learned']} of {turns['there']}{hidden}{why and f' ({why[:40]})'}"


def main() -> None:
    """Print the table."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/datasets/templates")
    header("template", *CHATS)
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text("utf-8")
        row(path.stem, *(outcome(template, messages) for messages in CHATS.values()))


if __name__ == "__main__":
    main()
