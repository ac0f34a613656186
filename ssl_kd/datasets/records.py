"""Interpret records of data sets: texts, questions and chats in their common forms."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from ssl_kd.datasets.decode import decode

IMAGE = "<image>"
"""The place of an image in a string, as in LLaVA's data sets."""

ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
"""The prompt of Alpaca's records.

References:
    Taori et al. (2023), Stanford Alpaca, https://github.com/tatsu-lab/stanford_alpaca.
"""
_ROLES = {  # of ShareGPT's records
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "function_call": "assistant",
    "system": "system",
}
_IMAGE_KEYS = ("bytes", "image", "path", "url", "image_url")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields with the thoughts before an assistant's answer."""
_OF_A_TURN = ("name", "tool_call_id", *THOUGHTS)
"""Fields of a message that chat templates use besides role, content and tool calls."""
_EXPECTED = (
    "strings in messages or conversations (of a chat), prompt and completion (or lists of "
    "messages in both), question and answer, instruction and output, or text; --text_field selects "
    "another field of text"
)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a record.

    Attributes:
        source: its file, or the bytes of a file.
        digest: SHA-256 of these bytes.
    """

    source: Path | bytes
    digest: str

    @classmethod
    def of(cls, source: Path | bytes) -> Picture:
        """Create an image, whose file is read once for its digest; raise OSError."""
        content = source if isinstance(source, bytes) else source.read_bytes()
        return cls(source, hashlib.sha256(content).hexdigest())

    def image(self, where: str) -> Image.Image:
        """Decode to RGB; raise UnreadableImage, which begins with `where` and names the file."""
        if isinstance(self.source, bytes):
            return decode(io.BytesIO(self.source), where).convert("RGB")
        return decode(self.source, f"{where}, {self.source}").convert("RGB")


@dataclass(frozen=True)
class Pictures:
    """The images of a batch.

    Attributes:
        inputs: inputs of a model in addition to the tokens, by argument name.
        of: the digests of each row's images, joined by spaces.
    """

    inputs: Mapping[str, Tensor]
    of: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A `text`, a `prompt` with its `completion`, or chat `messages`.

    Attributes:
        where: its place in the data: `file.jsonl:17`, the line or the record.
        text: a document, all of which is learned.
        prompt: the input, which is not learned; with `completion`.
        completion: the text learned after the prompt.
        messages: each with `role` and `content`, a string; messages of the role `assistant` are
            learned, with their `tool_calls` (`{"type", "function": {"name", "arguments"}}`).
        given: number of messages that are a prompt, in which nothing is learned.
        tools: JSON schemas of the tools for the chat template.
        images: the images in order: in strings at each IMAGE, in messages at each part
            `{"type": "image"}` (the content of such a message is a list of parts).
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
        """Return the content as bytes, without its source, so that duplicates are equal.

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
    """Interpret a record; return an example, or a complaint if it has nothing to learn.

    The first of these that it contains: `messages`; `conversations` (ShareGPT, with `from` and
    `value`, and an optional field `system`); `prompt` and `completion`, strings or lists of
    messages (TRL); `question` and `answer` (the question and a line break are the prompt; GSM8K);
    `instruction`, `input` and `output` (in Alpaca's prompt); `text`. Chats may have `tools`. Text
    parts of a message are joined; other parts must be images.

    Images are parts of messages (`{"type": "image", "image": ...}`, or `path`, `url`, or OpenAI's
    `image_url`), or in the fields `image` or `images` of the record (see `picture_of`). The latter
    belong to the parts without a source, or to each IMAGE in the strings; if there is no such
    place, they precede the first user message.

    Args:
        record: a mapping; anything else results in a complaint.
        where: the place of the record, for complaints.
        field: the field that contains a text; None for the forms above.
        folder: the folder of relative image paths; None: the working directory.
    """
    if not isinstance(record, Mapping):
        return f"{where}: not an object but {type(record).__name__}"
    try:
        if field is not None:
            return _text(record, where, field)
        example = (
            _chat(record, where, images := _Images(record, folder or Path()))
            or _prompted(record, where)
            or _alpaca(record, where)
            or _text(record, where, "text", _EXPECTED)
        )
        return images.placed(example)
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
        start, rest = record.get(prompt), record.get(completion)
        if isinstance(start, str) and isinstance(rest, str):
            start += "\n" if prompt == "question" else ""
            return Example(where, prompt=start, completion=_not_empty(rest, completion))
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


def _chat(record: Mapping[str, Any], where: str, images: _Images) -> Example | None:
    prompt, completion = record.get("prompt"), record.get("completion")
    given: Sequence[Any] = ()
    if (messages := _listed(record, "messages")) is None:
        if (messages := _listed(record, "conversations")) is not None:
            system = record.get("system")
            messages = [{"role": "system", "content": system}, *messages] if system else messages
        elif isinstance(prompt, list) and isinstance(completion, list):
            given, messages = prompt, completion
        else:
            return None
    turns = tuple(_turn(message, images) for message in (*given, *messages))
    learned = (t for t in turns[len(given) :] if t["role"] == "assistant")
    if not any(turn["content"].strip() or "tool_calls" in turn for turn in learned):
        raise _Unusable("no message of the assistant to learn from")
    tools = _plain(_listed(record, "tools"))
    return Example(where, messages=turns, given=len(given), tools=tuple(tools) if tools else None)


def _listed(record: Mapping[str, Any], field: str) -> list[Any] | None:
    """Return a field that is a list, or a list in JSON (in a table every cell is a string)."""
    value = record.get(field)
    if isinstance(value, str) and value.strip():
        value = _parsed(value, field)
        if not isinstance(value, list):
            raise _Unusable(f"{field} is not a list but {type(value).__name__}")
    return value if isinstance(value, list) else None


def _turn(message: Any, images: _Images) -> dict[str, Any]:
    """Convert a message to the form of chat templates."""
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
        raise _Unusable("an image in a message of the assistant, which no model here can generate")
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
    """Convert a part of a message's content, without the source of its image."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in ("image", "image_url"):
        images.parts.append(images.read({**part, "type": None}))
        return {"type": "image"}
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise _Unusable(f"a message has a part of the type {kind!r}; expected text or image")
    return {"type": "text", "text": text}


class _Images:
    """The images of a record.

    Attributes:
        listed: images in the fields `image` and `images`.
        parts: images of parts of messages, in order; None for the next listed one.
    """

    def __init__(self, record: Mapping[str, Any], folder: Path) -> None:
        self._folder = folder
        self.parts: list[Picture | None] = []
        values = [record[name] for name in ("image", "images") if record.get(name)]
        self.listed = [
            self.read(one)
            for value in values
            for one in (value if isinstance(value, list | tuple) else [value])
        ]

    def read(self, value: Any) -> Picture | None:
        """Read an image; return None for a part without a source."""
        if isinstance(value, Mapping) and not any(value.values()):
            return None
        try:
            return picture_of(value, self._folder)
        except ValueError as error:
            raise _Unusable(str(error)) from error

    def cut(self, content: str) -> list[dict[str, str]]:
        """Split a message at each IMAGE into parts."""
        first, *others = content.split(IMAGE)
        parts = [{"type": "text", "text": first}] if first else []
        for text in others:
            self.parts.append(None)
            parts.append({"type": "image"})
            parts += [{"type": "text", "text": text}] if text else []
        return parts

    def placed(self, example: Example) -> Example:
        """Return the example with its images, each at its place."""
        if example.messages is None:
            strings = [example.text or "", example.prompt or "", example.completion or ""]
            self.parts = [None] * (sum(map(str.count, strings, [IMAGE] * 3)) if self.listed else 0)
        if self.listed and not self.parts:
            example = _led(example, len(self.listed))
            self.parts = [None] * len(self.listed)
        places = self.parts.count(None)
        if places != len(self.listed):
            raise _Unusable(f"{len(self.listed)} images, and {places} places for them")
        if example.completion and self.listed and IMAGE in example.completion:
            raise _Unusable("an image in the completion, which no model here can generate")
        listed = iter(self.listed)
        images = tuple(next(listed) if image is None else image for image in self.parts)
        return replace(example, images=images) if images else example


def _led(example: Example, images: int) -> Example:
    """Insert places for images before the first user message."""
    lead = IMAGE * images
    if example.messages is None:
        name = "prompt" if example.text is None else "text"
        return replace(example, **{name: f"{lead}{getattr(example, name)}"})
    turns = list(example.messages)
    at = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if at is None:
        raise _Unusable("images, but no user message to put them in")
    content = turns[at]["content"]
    old_parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [*({"type": "image"} for _ in range(images)), *old_parts]
    turns[at] = {**turns[at], "content": parts}
    return replace(example, messages=tuple(turns))


def _call(call: Any) -> dict[str, Any]:
    """Convert a tool call, whose arguments may be JSON as in OpenAI's API."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _Unusable("a tool call must hold function, with name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise _Unusable(f"arguments of {function['name']} are not an object")
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    function = {"name": function["name"], "arguments": _plain(arguments)}
    return {**call_id, "type": "function", "function": function}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"{what}: not JSON ({error})") from error


def _plain(value: Any) -> Any:
    """Convert to JSON's types (a table may contain dates)."""
    return json.loads(json.dumps(value, default=str))


def picture_of(value: Any, folder: Path) -> Picture:
    """Read an image from a field of a record.

    Accepts a path (relative to the folder of the record's file), a `data:` URL, bytes, an image of
    PIL, or a mapping that contains one of these, as in `datasets` and OpenAI's API.

    Raises:
        ValueError: it is none of these, on the network, or a file that cannot be read.
    """
    if isinstance(value, Mapping):
        inner = next((value[key] for key in _IMAGE_KEYS if value.get(key)), None)
        if inner is None:
            raise ValueError(
                f"an image has {sorted(map(str, value))}; expected one of {_IMAGE_KEYS}"
            )
        return picture_of(inner, folder)
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return Picture.of(buffer.getvalue())
    if isinstance(value, bytes):
        return Picture.of(value)
    if not isinstance(value, str | os.PathLike):
        raise ValueError(
            f"an image is {type(value).__name__}: expected a path, URL, bytes or PIL's"
        )
    name = os.fspath(value)
    if name.startswith(("http://", "https://")):
        raise ValueError(f"the image {name[:80]} is on the network: download it, and give its file")
    try:
        if name.startswith("data:"):
            _, mark, content = name.partition(";base64,")
            if not mark:
                raise ValueError("an image is a data: URL that is not base64")
            return Picture.of(base64.b64decode(content, validate=True))
        return Picture.of(folder / Path(name).expanduser())
    except OSError as error:
        raise ValueError(f"the image {name} cannot be read: {error.strerror or error}") from error
