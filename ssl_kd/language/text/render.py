"""Format examples with a chat template, and locate the assistant turns to train on.

An assistant turn is trained on from the end of the generation prompt to the end of the turn,
including reasoning, content, tool calls and the end-of-turn token. Two simple methods to locate it
fail: the first messages, rendered alone, need not be a prefix of the conversation, since templates
rewrite earlier turns (Qwen3 and gpt-oss drop reasoning, Mistral moves the tools), and contents
cannot be searched for, since they may repeat.

Therefore the conversation is rendered a second time with marks, which are rare characters. They are
inserted at both ends of each content and reasoning (inside the whitespace that templates strip, and
next to the `</think>` at which they split) and after the name of each tool call. Without the marks
the second text must equal the first, so the marks locate each part of each message. A turn is then
located by the first of these that applies:

1. The `{% generation %}` blocks of the template that hold its marks, without the generation
   prompt.
2. Its marks: it begins where the text before the first one ends with the generation prompt, and
   ends where the text after the last one no longer matches what the template writes after a last
   turn.
3. Where the marks change what the template writes: the first messages, rendered alone, if they are
   a prefix of the conversation.

A turn that none of them locates is not trained on, and the run says so.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ssl_kd.core.errors import InputError, brief
from ssl_kd.language.text.records import THOUGHTS, Example

_CONTROL = re.compile(r"(?:<[^<>\s]+>|\[/?[A-Z_]+\])")  # <|im_end|>, </s>, [/INST]
_ENDED = re.compile(_CONTROL.pattern + r"\s*")
_CLOSE = re.compile(r"\s*" + _ENDED.pattern)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EMPTY = re.compile(r"\s*<think>\s*</think>\s*")
_INLINE = re.compile(r".*</think>\s*", re.DOTALL)
_OPEN, _SHUT = "\U00013000", "\U00013001"  # hieroglyphs, which templates and texts do not contain
_MARK = re.compile(rf"{_OPEN}(\d+)(content|reasoning|call\d+){_SHUT}")
_NOT_LOCATED = "cannot be located in the output of the chat template"
_LENGTHS: dict[tuple[object, ...], int] = {}  # cache of `_Chat._length`, across conversations

_Spans = list[tuple[int, int]]


class _Mark(NamedTuple):
    """A place in a rendered conversation."""

    position: int  # in the text without marks
    message: int  # number of the message; -1 before the first one
    part: str  # of the message: content, reasoning, or call0, call1, ...


_START = _Mark(0, -1, "")


@dataclass(frozen=True)
class Rendered:
    """A formatted example."""

    text: str
    # to train on: (begin, end, UTF-8 bytes of the content)
    spans: tuple[tuple[int, int, int], ...] = ()
    left_out: tuple[str, ...] = ()  # messages about turns that are not trained on
    # assistant turns: there (all), learned, lost (not located), hidden (reasoning omitted)
    turns: Counter[str] = field(default_factory=Counter)


def render(
    example: Example, tokenizer: Any, template: str | None = None, *, learn_thoughts: bool = True
) -> Rendered:
    """Format an example as a string, with the tokenizer's chat template or another one.

    Without `learn_thoughts`, the reasoning of a turn and the marks around it are not trained on.
    """
    if example.messages is None:
        prompt, learned = example.prompt or "", example.text or example.completion or ""
        text = prompt + learned
        if not learn_thoughts and (thought := _INLINE.match(learned)):
            learned = learned[thought.end() :]
        spans = (
            () if example.is_prompt else ((len(text) - len(learned), len(text), _n_bytes(learned)),)
        )
        return Rendered(text, spans)
    if not (template or tokenizer.chat_template):
        raise InputError(
            f"{example.where}: messages need a chat template, but the tokenizer "
            f"{tokenizer.name_or_path!r} has none: use the tokenizer of a chat model, set "
            "tokenizer.chat_template, or use prompt and completion"
        )
    roles = [message["role"] for message in example.messages]
    turns = [i for i in range(example.given, len(roles)) if roles[i] == "assistant"]
    try:
        if example.is_prompt:
            shown = show_chat(example.messages, example.tools, tokenizer, template, prompt=True)
            return Rendered(shown[0])
        return _Chat(example, tokenizer, template).rendered(turns, learn_thoughts)
    except TemplateError as error:
        line = f"{example.where}: the chat template {error}"
        return Rendered("", (), (line,), Counter(there=len(turns)))


def check_located(name: str, turns: Counter[str], left_out: Sequence[str]) -> None:
    """Raise InputError if more than 1 % of the assistant turns of a data set were not located."""
    if 100 * turns["lost"] > turns["there"]:
        first = next(line for line in left_out if _NOT_LOCATED in line)
        raise InputError(
            f"{name}: {turns['lost']:,} of {turns['there']:,} assistant turns cannot be trained on "
            f"({first}); expected at most 1 %: use a chat template with {{% generation %}} blocks "
            "around the text to train on, or use prompt and completion"
        )


def describe_turns(turns: Counter[str]) -> str:
    """Describe how many assistant turns are trained on; return an empty string for no turns.

    >>> describe_turns(Counter(there=3, learned=2, hidden=1))
    '2 of 3 assistant turns are trained on; the template omits the reasoning of 1 earlier turn'
    """
    if not turns["there"]:
        return ""
    text = f"{turns['learned']:,} of {turns['there']:,} assistant turns are trained on"
    if n_hidden := turns["hidden"]:
        noun = "turn" if n_hidden == 1 else "turns"
        text += f"; the template omits the reasoning of {n_hidden:,} earlier {noun}"
    return text


def show_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    tokenizer: Any,
    template: str | None = None,
    *,
    prompt: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Apply a chat template; return the text and the positions of its `{% generation %}` blocks.

    With `prompt`, the generation prompt is added. TemplateError is raised if the template fails.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    def show(messages: Sequence[Mapping[str, Any]]) -> Any:
        chosen = tokenizer.get_chat_template(template, tools or None)
        return render_jinja_template(
            [[dict(message) for message in messages]],
            tools=list(tools) if tools else None,
            chat_template=chosen,
            return_assistant_tokens_mask=bool(_GENERATION.search(chosen)),
            add_generation_prompt=prompt,
            **tokenizer.special_tokens_map,
        )

    def in_json(_: int, call: Mapping[str, Any]) -> dict[str, Any]:
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}

    try:
        try:
            texts, blocks = show(messages)
        except TypeError:  # DeepSeek's templates expect the arguments as strings
            texts, blocks = show([_with_calls(message, in_json) for message in messages])
    except Exception as error:  # templates fail in many ways
        raise TemplateError(f"fails on the messages: {brief(error)}") from error
    return texts[0], blocks[0] if blocks else []


def _with_calls(
    message: Mapping[str, Any], change: Callable[[int, Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    calls = enumerate(message.get("tool_calls", ()))
    changed = [{**call, "function": change(n, call["function"])} for n, call in calls]
    return {**message, "tool_calls": changed} if changed else dict(message)


class _Chat:
    """Formats a conversation and locates its assistant turns."""

    def __init__(self, example: Example, tokenizer: Any, template: str | None) -> None:
        messages = example.messages or ()
        self._messages = messages
        self._where = example.where
        self._tools = example.tools
        self._chosen = (tokenizer, template)
        self._template = tokenizer.get_chat_template(template, example.tools)
        self._text, self._blocks = show_chat(messages, example.tools, tokenizer, template)
        self._sizes: list[dict[str, int]] = [{} for _ in messages]  # part -> UTF-8 bytes
        self._marked = [self._mark(i, message) for i, message in enumerate(messages)]
        self._shown = cache(self._show)

    def _mark(self, i: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with marks, and note the number of bytes of each of its parts."""

        def mark(part: str, size: int) -> str:
            self._sizes[i][part] = size
            return f"{_OPEN}{i}{part}{_SHUT}"

        def edged(text: str, part: str, size: int) -> str:
            core = text.strip()
            return text.replace(core, core.join([mark(part, size)] * 2), 1) if core else text

        def marked(text: str) -> str:
            if message["role"] != "assistant":  # templates look for a user's <tool_response>
                return text if text.lstrip().startswith("<") else edged(text, "content", 0)
            before, close, answer = text.rpartition("</think>")
            begin, tag, thought = before.rpartition("<think>")
            if not text.strip() and not message.keys() & {"tool_calls", *THOUGHTS}:
                return text + mark("content", _n_bytes(text))  # an empty turn: train on its end
            thought = edged(thought, "reasoning", _n_bytes(before + close))
            return begin + tag + thought + close + edged(answer, "content", _n_bytes(answer))

        def marked_call(n: int, call: Mapping[str, Any]) -> dict[str, Any]:
            size = _n_bytes(json.dumps(call, ensure_ascii=False))
            return {**call, "name": call["name"] + mark(f"call{n}", size)}

        content = message["content"]
        if isinstance(content, str):
            content = marked(content)
        else:
            content = [{**p, "text": marked(p["text"])} if "text" in p else p for p in content]
        thoughts = {
            name: edged(message[name], "reasoning", _n_bytes(message[name]))
            for name in THOUGHTS
            if name in message
        }
        return {**_with_calls(message, marked_call), **thoughts, "content": content}

    def _show(self, upto: int, prompt: bool = False) -> tuple[str, list[_Mark]]:
        """Render the first messages with marks; return the text without marks, and the marks."""
        text, _ = show_chat(self._marked[:upto], self._tools, *self._chosen, prompt=prompt)
        marks: list[_Mark] = []
        calls = set()
        n_removed = 0  # characters of the marks so far
        for match in _MARK.finditer(text):
            mark = _Mark(match.start() - n_removed, int(match[1]), match[2])
            n_removed += len(match[0])
            # gpt-oss repeats the name of a call before the tool's result: the first one counts.
            if mark[1:] not in calls:
                marks.append(mark)
            if mark.part.startswith("call"):
                calls.add(mark[1:])
        return _MARK.sub("", text), marks

    def rendered(self, turns: Sequence[int], learn_thoughts: bool) -> Rendered:
        """Return the text with the spans of the assistant turns, given by message number."""
        spans = []
        lost = []
        hidden = 0
        try:
            whole, marks = self._shown(len(self._messages))
        except TemplateError:
            whole, marks = "", []
        for number, i in enumerate(turns, 1):
            sizes = self._sizes[i]
            if whole == self._text:
                parts = {mark.part for mark in marks if mark.message == i}
                hidden += self._hides(i, parts)
                located = self._by_marks(i, marks)
            else:  # the marks changed the output of the template
                parts, located = sizes.keys(), self._by_prefixes(i)
            if not learn_thoughts:
                located = self._without_thoughts(located, i, marks if whole == self._text else [])
                parts = parts - {"reasoning"}
            n_bytes = [0] * (len(located) - 1) + [sum(sizes[part] for part in parts)]
            spans += [(*span, n) for span, n in zip(located, n_bytes, strict=False)]
            if not located:
                lost.append(f"{self._where}: assistant turn {number} {_NOT_LOCATED}")
        counts = Counter(there=len(turns), learned=len(turns) - len(lost), lost=len(lost))
        return Rendered(self._text, tuple(spans), tuple(lost), counts + Counter(hidden=hidden))

    def _hides(self, i: int, shown: set[str]) -> bool:
        """Return whether only an earlier reasoning is omitted; raise if a part is never shown."""
        absent = self._sizes[i].keys() - shown
        if not absent or not shown and absent == {"content"}:  # the whole turn: not located
            return False
        there = {mark.part for mark in self._shown(i + 1)[1] if mark.message == i}
        if never := {"tool calls" if "call" in part else part for part in absent - there}:
            what = " and ".join(sorted(never, reverse=True))
            raise TemplateError(f"omits the {what}: use another template, or remove them")
        return True

    def _by_prefixes(self, i: int) -> list[tuple[int, int]]:
        """Locate a turn if the rendered first messages are a prefix of the conversation."""
        message, earlier = self._messages[i], self._messages[:i]
        before = show_chat(earlier, self._tools, *self._chosen, prompt=True)[0] if i else ""
        after, _ = show_chat([*earlier, message], self._tools, *self._chosen)
        there = [call["function"]["name"] for call in message.get("tool_calls", ())]
        there += [message[name].strip() for name in THOUGHTS if name in message]
        fits = self._text.startswith(before) and self._text.startswith(after)
        whole = fits and all(part in after[len(before) :] for part in there)
        return [(len(before), len(after))] if whole else []

    def _by_marks(self, i: int, marks: list[_Mark]) -> list[tuple[int, int]]:
        """Locate a turn by its marks; return an empty list if that fails."""
        at = [n for n, mark in enumerate(marks) if mark.message == i]
        if not at or at != list(range(at[0], at[-1] + 1)):
            return []
        begin = self._begin(i, marks, at[0])
        if self._blocks:
            places = [marks[n].position for n in at]
            blocks = [b for b in self._blocks if any(b[0] <= place <= b[1] for place in places)]
            return [(max(first, begin or 0), last) for first, last in blocks]
        end: int | None = len(self._text)
        if i < len(self._messages) - 1:
            following = marks[at[-1] + 1 :]
            stop = following[0].position if following else len(self._text)
            end = self._end(i + 1, marks[at[-1]], stop)
        return [] if begin is None or end is None else [(begin, end)]

    def _without_thoughts(self, spans: _Spans, i: int, marks: list[_Mark]) -> _Spans:
        """Cut the reasoning off the beginning of a turn; return an empty list if that fails."""
        at = [mark.position for mark in marks if mark[1:] == (i, "reasoning")]
        if not spans or ("reasoning" in self._sizes[i] and not marks):
            return []
        end = at[-1] if at else spans[0][0]
        close = (_CLOSE if at else _EMPTY).match(self._text, end)
        end = close.end() if close else end
        return [(max(begin, end), stop) for begin, stop in spans if stop > end]

    def _begin(self, i: int, marks: list[_Mark], at: int) -> int | None:
        """Return the position just after the prompt of the turn that `marks[at]` begins."""
        if i:
            before = marks[at - 1] if at else _START
            return self._end(i, before, marks[at].position, prompt=True)
        # The turn is the first message: search for the prompt that follows the last message.
        more, _ = self._shown(len(self._messages), prompt=True)
        prompt = more[_common(self._text, more) :]
        place = self._text.rfind(prompt, 0, marks[at].position)
        return place + len(prompt) if prompt and place >= 0 else 0

    def _end(self, upto: int, mark: _Mark, stop: int, *, prompt: bool = False) -> int | None:
        """Return where the first messages (and a generation prompt) end after their last mark.

        The result depends only on the text between two marks, so it is cached across conversations.
        """
        gap = self._text[mark.position : stop]
        role = self._messages[upto - 1]["role"]
        key = (self._template, bool(self._tools), role, mark.part, prompt, gap)
        length = _LENGTHS.get(key)
        if length is None:
            try:
                length = self._length(gap, mark, upto, prompt)
            except TemplateError:
                return None
            if length is not None and len(gap) < 256 and len(_LENGTHS) < 4096:
                _LENGTHS[key] = length
        return None if length is None else mark.position + length

    def _length(self, gap: str, mark: _Mark, upto: int, prompt: bool) -> int | None:
        """Return how many characters of `gap` belong to the messages before it."""
        text, marks = self._shown(upto, prompt=prompt)
        last = marks[-1] if marks else _START
        if last[1:] != mark[1:]:
            return None
        tail = text[last.position :]
        if gap.startswith(tail):
            return len(tail)
        # The prompt may contain `<think>`, unlike the turn. The last turn may end with EOS.
        common = _common(gap, tail)
        if _CONTROL.search(gap, 0, common):
            return common
        ended = None if prompt else _ENDED.match(gap, common)
        return ended.end() if ended else None


def _n_bytes(text: str) -> int:
    return len(text.encode())


def _common(text: str, other: str) -> int:
    """Return the length of the common prefix, without a partial control token."""
    end = len(os.path.commonprefix([text, other]))
    return next((m.start() for m in _CONTROL.finditer(text) if m.start() < end < m.end()), end)
