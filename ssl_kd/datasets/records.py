"""What a record of a data set means: the forms in which people write texts, questions and chats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssl_kd.datasets.picture import Picture, picture_of

IMAGE = "<image>"
"""Where an image stands in a string, as LLaVA's data sets write it."""

ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
"""The prompt that Alpaca's records stand for.

References:
    Taori et al. (2023), Stanford Alpaca, https://github.com/tatsu-lab/stanford_alpaca.
"""
_ROLES = {  # who speaks in ShareGPT's records
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "function_call": "assistant",
    "system": "system",
}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Where data sets write what an assistant thought before it spoke."""
_OF_A_TURN = ("name", "tool_call_id", *THOUGHTS)
"""What chat templates read of a message beside role, content and tool calls."""
_EXPECTED = (
    "strings in messages or conversations (of a chat), prompt and completion (or lists of "
    "messages in both), question and answer, instruction and output, or text; --text_field names "
    "another field whose text is learned"
)


@dataclass(frozen=True, slots=True)
class Example:
    """One thing to learn: a `text`, or a `prompt` with its `completion`, or chat `messages`.

    Attributes:
        where: where it was read: `file.jsonl:17`, the line or the record.
        text: a document, all of which is learned.
        prompt: what is given, and not learned; with `completion`.
        completion: what is learned after the prompt.
        messages: `role` and `content`, a string, each; what the role `assistant` says is learned,
            its `tool_calls` (`{"type", "function": {"name", "arguments"}}`) with it.
        given: how many of the messages are a prompt, in which nothing is learned.
        tools: the tools that the chat template gets, as JSON schemas.
        images: those that stand in it, in their order: in strings at each IMAGE, in messages at
            each part `{"type": "image"}` (the content of such a message is a list of parts).
    """

    where: str
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    given: int = 0
    tools: tuple[Any, ...] | None = None
    images: tuple[Picture, ...] = ()

    def content(self) -> bytes:
        """Its content, whatever the place: equal bytes are duplicates.

        Raises:
            UnicodeEncodeError: half of a surrogate pair, which is not valid text.
        """
        parts = self.text or (self.prompt, self.completion, self.messages)
        if self.given or self.tools:
            parts = (*parts, self.given, self.tools)
        if self.images:
            parts = (*parts, [image.digest for image in self.images])
        return json.dumps(parts, ensure_ascii=False).encode()


class _Unusable(Exception):
    """Why a record cannot be learned from."""


def as_example(
    record: Any, where: str, field: str | None = None, folder: Path | None = None
) -> Example | str:
    """What a record says, or why it says nothing that can be learned.

    The first of these that it holds: `messages`; `conversations` (ShareGPT, with `from` and
    `value`, and `system` beside them); `prompt` and `completion`, strings or lists of messages
    (TRL); `question` and `answer` (the question and a line break are the prompt; GSM8K);
    `instruction`, `input` and `output` (in Alpaca's own prompt); `text`. Chats may bring `tools`. A
    message's parts of text are joined; one with a part of a kind that is neither text nor image is
    not learned.

    Images are parts of messages (`{"type": "image", "image": ...}`, or `path`, `url`, or OpenAI's
    `image_url`), or stand in the fields `image` or `images` of the record (see `picture_of`). The
    latter have their places at the parts that name none, or at each IMAGE in the strings; where
    there is no such place, before the first thing that the user says.

    Args:
        record: what was read: a mapping, or something that is none.
        where: names it in complaints.
        field: a field that holds a text; no other is looked at. None for the forms above.
        folder: where paths of images begin; None: where the process runs.
    """
    if not isinstance(record, Mapping):
        return f"{where}: not an object but {type(record).__name__}"
    try:
        if field is not None:
            return _text(record, where, field)
        found = (
            _chat(record, where, images := _Images(record, folder or Path()))
            or _prompted(record, where)
            or _alpaca(record, where)
            or _text(record, where, "text", _EXPECTED)
        )
        return images.placed(found)
    except _Unusable as error:
        return f"{where}: {error}"


def _text(record: Mapping[str, Any], where: str, field: str, expected: str = "") -> Example:
    text = record.get(field)
    if not isinstance(text, str):
        expected = expected or f"a string in {field}, the field that --text_field names"
        raise _Unusable(f"holds {sorted(map(str, record))[:8]}; expected {expected}")
    return Example(where, text=_not_empty(text, field))


def _prompted(record: Mapping[str, Any], where: str) -> Example | None:
    for prompt, completion in (("prompt", "completion"), ("question", "answer")):
        given, learned = record.get(prompt), record.get(completion)
        if isinstance(given, str) and isinstance(learned, str):
            given += "\n" if prompt == "question" else ""
            return Example(where, prompt=given, completion=_not_empty(learned, completion))
    return None


def _alpaca(record: Mapping[str, Any], where: str) -> Example | None:
    instruction, output = record.get("instruction"), record.get("output")
    if not isinstance(instruction, str) or not isinstance(output, str):
        return None
    given = record.get("input") or ""
    if not isinstance(given, str):
        raise _Unusable(f"input is not a string but {type(given).__name__}")
    context = ", paired with an input that provides further context" if given else ""
    prompt = ALPACA.format(context, instruction, f"### Input:\n{given}\n\n" if given else "")
    return Example(where, prompt=prompt, completion=_not_empty(output, "output"))


def _not_empty(text: str, field: str) -> str:
    if not text.strip():
        raise _Unusable(f"{field} is empty")
    return text


# --- chats ----------------------------------------------------------------------------------------


def _chat(record: Mapping[str, Any], where: str, images: _Images) -> Example | None:
    prompt, completion = record.get("prompt"), record.get("completion")
    given: Sequence[Any] = ()
    if (spoken := _listed(record, "messages")) is None:
        if (spoken := _listed(record, "conversations")) is not None:
            system = record.get("system")
            spoken = [{"role": "system", "content": system}, *spoken] if system else spoken
        elif isinstance(prompt, list) and isinstance(completion, list):
            given, spoken = prompt, completion
        else:
            return None
    turns = tuple(_turn(message, images) for message in (*given, *spoken))
    learned = (t for t in turns[len(given) :] if t["role"] == "assistant")
    if not any(turn["content"].strip() or "tool_calls" in turn for turn in learned):
        raise _Unusable("no message of the assistant to learn from")
    tools = _plain(_listed(record, "tools"))
    return Example(where, messages=turns, given=len(given), tools=tuple(tools) if tools else None)


def _listed(record: Mapping[str, Any], field: str) -> list[Any] | None:
    """A field that is a list, or a list as JSON (in a table every cell is a string)."""
    value = record.get(field)
    if isinstance(value, str) and value.strip():
        value = _parsed(value, field)
        if not isinstance(value, list):
            raise _Unusable(f"{field} is not a list but {type(value).__name__}")
    return value if isinstance(value, list) else None


def _turn(message: Any, images: _Images) -> dict[str, Any]:
    """A message as chat templates take it."""
    if not isinstance(message, Mapping):
        raise _Unusable("a message must hold the strings role and content (or from and value)")
    role, content, calls = (message.get(name) for name in ("role", "content", "tool_calls"))
    if role is None and "from" in message:
        speaker, content = str(message["from"]), message.get("value")
        role = _ROLES.get(speaker)
        if role is None:
            raise _Unusable(f"a message is from {speaker!r}; expected one of {', '.join(_ROLES)}")
        if speaker == "function_call":
            calls, content = _parsed(str(content), "a function_call"), None
            calls = calls if isinstance(calls, list) else [calls]
    if isinstance(content, list):
        parts = [_part(part, images) for part in content]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        content = "".join(texts) if len(texts) == len(parts) else parts
    if isinstance(content, str) and images.listed and IMAGE in content:
        content = images.cut(content)
    if isinstance(content, list) and role == "assistant":
        raise _Unusable("an image in a message of the assistant, which no model here can write")
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise _Unusable("a message must hold the strings role and content (or from and value)")
    turn: dict[str, Any] = {"role": role, "content": content}
    turn |= {name: message[name] for name in _OF_A_TURN if isinstance(message.get(name), str)}
    if calls:
        turn["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [0])]
    return turn


def _part(part: Any, images: _Images) -> dict[str, str]:
    """A part of a message's content, without the source of its image."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in ("image", "image_url"):
        images.found.append(images.read({**part, "type": None}))
        return {"type": "image"}
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise _Unusable(f"a message has a part of the type {kind!r}; expected text or image")
    return {"type": "text", "text": text}


class _Images:
    """The images of a record: those that it lists, and those that its messages name.

    Attributes:
        listed: of the fields `image` and `images`.
        found: of the parts of messages, in their order; None for the next one that is listed.
    """

    def __init__(self, record: Mapping[str, Any], folder: Path) -> None:
        self._folder = folder
        self.found: list[Picture | None] = []
        values = [record[name] for name in ("image", "images") if record.get(name)]
        self.listed = [
            self.read(one)
            for value in values
            for one in (value if isinstance(value, list | tuple) else [value])
        ]

    def read(self, value: Any) -> Picture | None:
        """An image; None of a part that is but a place for one."""
        if isinstance(value, Mapping) and not any(value.values()):
            return None
        try:
            return picture_of(value, self._folder)
        except ValueError as error:
            raise _Unusable(str(error)) from error

    def cut(self, content: str) -> list[dict[str, str]]:
        """A message with IMAGE in it, in parts."""
        first, *others = content.split(IMAGE)
        parts = [{"type": "text", "text": first}] if first else []
        for text in others:
            self.found.append(None)
            parts.append({"type": "image"})
            parts += [{"type": "text", "text": text}] if text else []
        return parts

    def placed(self, example: Example) -> Example:
        """The example with its images, each at its place."""
        if example.messages is None:
            strings = [example.text or "", example.prompt or "", example.completion or ""]
            self.found = [None] * (sum(map(str.count, strings, [IMAGE] * 3)) if self.listed else 0)
        if self.listed and not self.found:
            example = _led(example, len(self.listed))
            self.found = [None] * len(self.listed)
        places = self.found.count(None)
        if places != len(self.listed):
            raise _Unusable(f"{len(self.listed)} images, and {places} places for them")
        if example.completion and self.listed and IMAGE in example.completion:
            raise _Unusable("an image in the completion, which no model here can write")
        listed = iter(self.listed)
        images = tuple(next(listed) if image is None else image for image in self.found)
        return replace(example, images=images) if images else example


def _led(example: Example, images: int) -> Example:
    """The example with places for images before the first thing that the user says."""
    lead = IMAGE * images
    if example.messages is None:
        name = "prompt" if example.text is None else "text"
        return replace(example, **{name: f"{lead}{getattr(example, name)}"})
    turns = list(example.messages)
    at = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if at is None:
        raise _Unusable("images, and no message of the user that they could stand in")
    content = turns[at]["content"]
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [*({"type": "image"} for _ in range(images)), *given]
    turns[at] = {**turns[at], "content": parts}
    return replace(example, messages=tuple(turns))


def _call(call: Any) -> dict[str, Any]:
    """A tool call; its arguments may have come as JSON, as OpenAI's API gives them."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _Unusable("a tool call must hold function, with name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise _Unusable(f"arguments of {function['name']} are not an object")
    own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    function = {"name": function["name"], "arguments": _plain(arguments)}
    return {**own, "type": "function", "function": function}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"{what}: not JSON ({error})") from error


def _plain(value: Any) -> Any:
    """The same in JSON's own types (a table may hold dates)."""
    return json.loads(json.dumps(value, default=str))
