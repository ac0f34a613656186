"""Convert records of text data sets, in their common forms, to training examples."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from ssl_kd.core.images.decode import decode

IMAGE = "<image>"
"""Marks the position of an image in a string, as in LLaVA's data sets."""

ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
"""Prompt template of Stanford Alpaca.

References:
    Taori et al. (2023), Stanford Alpaca, https://github.com/tatsu-lab/stanford_alpaca.
"""
_ROLES = {  # names of ShareGPT -> roles of chat templates
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "function_call": "assistant",
    "system": "system",
}
_IMAGE_KEYS = ("bytes", "image", "path", "url", "image_url")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Message fields that contain the reasoning before an assistant's answer."""
_MESSAGE_FIELDS = ("name", "tool_call_id", *THOUGHTS)
"""Optional message fields that chat templates use."""
ANSWERS = ("completions", "responses", "generations")  # fields with lists of answers
_NO_TEXT = "; --on_policy 1 or --teacher_text 1 lets a model continue a prompt"
_EXPECTED = (
    "one of the fields messages, conversations, prompt and completion, question and answer, "
    "instruction and output, or text; choose another text field with --text_field"
)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a record, not decoded yet."""

    source: Path | bytes  # path of the image file, or its content
    digest: str  # SHA-256 of the content

    @classmethod
    def of(cls, source: Path | bytes) -> Picture:
        """Create an image, reading a file once for the digest; raise OSError if that fails."""
        content = source if isinstance(source, bytes) else source.read_bytes()
        return cls(source, hashlib.sha256(content).hexdigest())

    def image(self, where: str) -> Image.Image:
        """Decode to RGB; raise UnreadableImage with `where` and the file in the message."""
        if isinstance(self.source, bytes):
            return decode(io.BytesIO(self.source), where).convert("RGB")
        return decode(self.source, f"{where}, {self.source}").convert("RGB")


@dataclass(frozen=True)
class Pictures:
    """The images of a batch."""

    inputs: Mapping[str, Tensor]  # image inputs of the model, by argument name
    of: tuple[str, ...]  # for each row, the digests of its images, joined by spaces


@dataclass(frozen=True, slots=True)
class Example:
    """A training example: a `text`, a `prompt` with a `completion`, or chat `messages`.

    Text, completion and assistant messages are trained on, including `tool_calls`
    (`{"type", "function": {"name", "arguments"}}`). A prompt alone is continued by a model.
    """

    where: str  # position in the data, such as `file.jsonl:17`
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    # with `role` and `content`, a string or a list of parts
    messages: tuple[Mapping[str, Any], ...] | None = None
    given: int = 0  # number of messages at the beginning that are not trained on
    tools: tuple[Any, ...] | None = None  # JSON schemas of the tools, for the chat template
    images: tuple[Picture, ...] = ()  # in order of IMAGE in strings, or of parts {"type": "image"}
    group: str = ""  # the same for all answers to a prompt; not part of the content
    privileged_context: str | None = None  # for TEACHER_MODEL self; not part of the content
    tag: str = ""  # of the teacher to learn from; not part of the content

    @property
    def is_prompt(self) -> bool:
        """Whether there is no text to train on."""
        if self.messages is not None:
            return self.given == len(self.messages)
        return self.text is None and self.completion is None

    def content(self) -> bytes:
        """Return all except `where` as bytes; UnicodeEncodeError for half a surrogate pair."""
        parts = self.text or (self.prompt, self.completion, self.messages)
        if self.given or self.tools:
            parts = (*parts, self.given, self.tools)
        if self.images:
            parts = (*parts, [image.digest for image in self.images])
        return json.dumps(parts, ensure_ascii=False).encode()


class _Unusable(Exception):
    """Raised with the reason why a record cannot be used for training."""


def as_examples(
    record: Any, where: str, field: str | None = None, tag_field: str | None = None, **options: Any
) -> Iterator[Example | str]:
    """Yield the result of `as_example`, with the same arguments, for each answer of a record.

    A record with several answers has a list of strings, or of lists of messages, in one of the
    fields ANSWERS, after a `prompt` or `messages` that end with the user's turn. Its field
    `tag_field` contains the tag of its examples.
    """
    fields = record if isinstance(record, Mapping) and field is None else {}
    answers = next((fields[n] for n in ANSWERS if isinstance(fields.get(n), list)), ())
    prompt = fields.get("prompt") or fields.get("messages")
    if not answers or not prompt or fields.get("completion") or _ends_with_assistant(prompt):
        example = as_example(record, where, field, **options)
        tag = str(record.get(tag_field)) if tag_field and isinstance(record, Mapping) else ""
        yield replace(example, tag=tag) if tag and isinstance(example, Example) else example
        return
    group = hashlib.sha256(json.dumps(prompt, default=str).encode()).hexdigest()
    for number, answer in enumerate(answers, 1):
        place = f"{where} answer {number}"
        if not isinstance(answer, str | list):
            yield f"{place}: {type(answer).__name__}; expected a string, or a list of messages"
            continue
        one = {"messages": None, "prompt": prompt, "completion": answer}
        single = {**fields, **dict.fromkeys(ANSWERS), **one}
        for example in as_examples(single, place, None, tag_field, **options):
            yield example if isinstance(example, str) else replace(example, group=group)


def _ends_with_assistant(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def as_example(
    record: Any, where: str, field: str | None = None, folder: Path = Path(), prompts: bool = False
) -> Example | str:
    """Convert a record to an example, or return a message that says why it cannot be used.

    The first form that fits is used, unless `field` names the field with the text:

    1. `messages`, optionally with `tools`.
    2. `conversations` with `from` and `value`, optionally with `system` (ShareGPT).
    3. `prompt` and `completion`, either strings or lists of messages (TRL).
    4. `question` and `answer` (GSM8K). The prompt is the question and a line break.
    5. `instruction`, `output` and optionally `input` (Alpaca, with its prompt template).
    6. `text`.
    7. With `prompts`: a `prompt` alone, or messages that end with the user's turn.

    Images are parts of messages (`{"type": "image", "image": ...}`, or `path`, `url`, or OpenAI's
    `image_url`), or are in the fields `image` or `images` of the record. The latter fill the image
    parts without a source, or replace each `<image>` in the strings; if there is neither, they are
    inserted before the first user message. Their paths are relative to `folder`.
    """
    if not isinstance(record, Mapping):
        return f"{where}: the record is {type(record).__name__}; expected an object"
    try:
        if field is not None:
            return _text(record, where, field)
        example = (
            _chat(record, where, images := _Images(record, folder), prompts)
            or _prompted(record, where, prompts)
            or _alpaca(record, where)
            or _text(record, where, "text", _EXPECTED)
        )
        context = record.get("privileged_context")
        return replace(images.placed(example), privileged_context=context)
    except _Unusable as error:
        return f"{where}: {error}"


def _text(record: Mapping[str, Any], where: str, field: str, expected: str = "") -> Example:
    text = record.get(field)
    if not isinstance(text, str):
        expected = expected or f"a string in the field {field} (--text_field)"
        raise _Unusable(f"the fields are {sorted(map(str, record))[:8]}; expected {expected}")
    return Example(where, text=_not_empty(text, field))


def _prompted(record: Mapping[str, Any], where: str, prompts: bool) -> Example | None:
    for prompt, completion in (("prompt", "completion"), ("question", "answer")):
        start, rest = record.get(prompt), record.get(completion)
        if isinstance(start, str) and isinstance(rest, str):
            start += "\n" if prompt == "question" else ""
            return Example(where, prompt=start, completion=_not_empty(rest, completion))
    start = record.get("prompt")
    if not isinstance(start, str) or record.get("text") or record.get("instruction"):
        return None
    if not prompts:
        raise _Unusable(f"there is a prompt without a completion{_NO_TEXT}")
    return Example(where, prompt=_not_empty(start, "prompt"))


def _alpaca(record: Mapping[str, Any], where: str) -> Example | None:
    instruction, output = record.get("instruction"), record.get("output")
    if not isinstance(instruction, str) or not isinstance(output, str):
        return None
    text = record.get("input") or ""
    if not isinstance(text, str):
        raise _Unusable(f"input is {type(text).__name__}; expected a string")
    context = ", paired with an input that provides further context" if text else ""
    prompt = ALPACA.format(context, instruction, f"### Input:\n{text}\n\n" if text else "")
    return Example(where, prompt=prompt, completion=_not_empty(output, "output"))


def _not_empty(text: str, field: str) -> str:
    if not text.strip():
        raise _Unusable(f"{field} is empty")
    return text


def _chat(record: Mapping[str, Any], where: str, images: _Images, prompts: bool) -> Example | None:
    prompt, completion = record.get("prompt"), record.get("completion")
    given: Sequence[Any] = ()
    if (messages := _listed(record, "messages")) is None:
        if (messages := _listed(record, "conversations")) is not None:
            system = record.get("system")
            messages = [{"role": "system", "content": system}, *messages] if system else messages
        elif isinstance(prompt, list):
            answer = [{"role": "assistant", "content": completion}]
            messages = answer if isinstance(completion, str) else completion or ()
            given = prompt
        else:
            return None
    turns = tuple(_turn(message, images) for message in (*given, *messages))
    is_prompt = prompts and bool(turns) and not _ends_with_assistant(turns)
    n_given = len(turns) if is_prompt else len(given)
    learned = (t for t in turns[n_given:] if t["role"] == "assistant")
    if not is_prompt and not any(t["content"].strip() or "tool_calls" in t for t in learned):
        raise _Unusable(f"there is no assistant message to train on{_NO_TEXT}")
    tools = _plain(_listed(record, "tools"))
    return Example(where, messages=turns, given=n_given, tools=tuple(tools) if tools else None)


def _listed(record: Mapping[str, Any], field: str) -> list[Any] | None:
    value = record.get(field)
    if isinstance(value, str) and value.strip():
        value = _parsed(value, field)
        if not isinstance(value, list):
            raise _Unusable(f"{field} is {type(value).__name__}; expected a list")
    return value if isinstance(value, list) else None


def _turn(message: Any, images: _Images) -> dict[str, Any]:
    """Convert a message to the form of chat templates."""
    if not isinstance(message, Mapping):
        raise _Unusable(f"a message is {type(message).__name__}; expected an object")
    role, content, calls = (message.get(name) for name in ("role", "content", "tool_calls"))
    if role is None and "from" in message:
        speaker, content = str(message["from"]), message.get("value")
        role = _ROLES.get(speaker)
        if role is None:
            raise _Unusable(f"from is {speaker!r}; expected one of {', '.join(_ROLES)}")
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
        raise _Unusable("an assistant message contains an image, which the models cannot generate")
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise _Unusable("a message lacks the strings role and content (or from and value)")
    turn: dict[str, Any] = {"role": role, "content": content}
    turn |= {name: message[name] for name in _MESSAGE_FIELDS if isinstance(message.get(name), str)}
    if calls:
        turn["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [0])]
    return turn


def _part(part: Any, images: _Images) -> dict[str, str]:
    """Convert a part of a message's content, moving the source of an image to `images`."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in ("image", "image_url"):
        images.parts.append(images.read({**part, "type": None}))
        return {"type": "image"}
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise _Unusable(f"a message part has the type {kind!r}; expected text or image")
    return {"type": "text", "text": text}


class _Images:
    """The images of a record: `listed` in its fields, and `parts` in its messages.

    A None in `parts` stands for the next listed image.
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
        """Read an image; return None if the part has no source."""
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
        """Return the example with its images in the order of their positions."""
        if example.messages is None:
            strings = [example.text or "", example.prompt or "", example.completion or ""]
            self.parts = [None] * (sum(map(str.count, strings, [IMAGE] * 3)) if self.listed else 0)
        if self.listed and not self.parts:
            example = _with_leading_images(example, len(self.listed))
            self.parts = [None] * len(self.listed)
        places = self.parts.count(None)
        if places != len(self.listed):
            raise _Unusable(f"there are {len(self.listed)} images, but {places} positions for them")
        if example.completion and self.listed and IMAGE in example.completion:
            raise _Unusable("the completion contains an image, which the models cannot generate")
        listed = iter(self.listed)
        images = tuple(next(listed) if image is None else image for image in self.parts)
        return replace(example, images=images) if images else example


def _with_leading_images(example: Example, images: int) -> Example:
    lead = IMAGE * images
    if example.messages is None:
        name = "prompt" if example.text is None else "text"
        return replace(example, **{name: f"{lead}{getattr(example, name)}"})
    turns = list(example.messages)
    at = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if at is None:
        raise _Unusable("there are images, but no user message to contain them")
    content = turns[at]["content"]
    old_parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [*({"type": "image"} for _ in range(images)), *old_parts]
    turns[at] = {**turns[at], "content": parts}
    return replace(example, messages=tuple(turns))


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _Unusable("a tool call lacks function with name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise _Unusable(
            f"arguments of {function['name']} is {type(arguments).__name__}; expected an object"
        )
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    function = {"name": function["name"], "arguments": _plain(arguments)}
    return {**call_id, "type": "function", "function": function}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"{what} is not valid JSON ({error})") from error


def _plain(value: Any) -> Any:
    """Convert to JSON's types, such as a date of a table to a string."""
    return json.loads(json.dumps(value, default=str))


def picture_of(value: Any, folder: Path) -> Picture:
    """Read an image from a field of a record; raise ValueError if that fails.

    The value is a path relative to `folder`, a `data:` URL, bytes, a PIL image, or a mapping that
    contains one of these as in `datasets` and OpenAI's API.
    """
    if isinstance(value, Mapping):
        inner = next((value[key] for key in _IMAGE_KEYS if value.get(key)), None)
        if inner is None:
            raise ValueError(
                f"an image has the fields {sorted(map(str, value))}; expected one of {_IMAGE_KEYS}"
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
            f"an image is {type(value).__name__}; expected a path, data: URL, bytes or PIL image"
        )
    name = os.fspath(value)
    if name.startswith(("http://", "https://")):
        raise ValueError(f"the image is {name[:80]}; expected a local file: download the image")
    try:
        if name.startswith("data:"):
            _, mark, content = name.partition(";base64,")
            if not mark:
                raise ValueError(
                    "an image is a data: URL without base64; expected data:...;base64,..."
                )
            return Picture.of(base64.b64decode(content, validate=True))
        return Picture.of(folder / Path(name).expanduser())
    except OSError as error:
        raise ValueError(f"the image {name} cannot be read: {error.strerror or error}") from error
