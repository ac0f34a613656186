"""What a teacher said elsewhere: a file of vLLM's answers, checked as those of its server are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from ssl_kd.datasets.spill import SpilledSequence
from ssl_kd.errors import InputError, printable
from ssl_kd.files import atomic_write
from ssl_kd.teachers.http_client import short
from ssl_kd.teachers.server import LARGEST, PromptAnswers, read_json


class AnswerFile(PromptAnswers):
    """Lines of JSON, each a prompt with vLLM's `prompt_logprobs`.

    A line holds the fields of a `RequestOutput` of vLLM, or is the whole answer of its server, with
    one of `choices`: `prompt_logprobs`, and `prompt_token_ids` or, for the tokenizer to split,
    `text` or `prompt`. At any other place than the first there is the prompt's own token, so every
    position is checked. Of several answers to a prompt the last counts. Of each prompt 16 bytes and
    a place in the file are in memory.

    Args:
        path: of the file; one that is not there has no answers.
        tokenizer: the teacher's.

    Raises:
        InputError: a line is not JSON, or has no tokens or no `prompt_logprobs`; names it.
    """

    def __init__(self, path: str | Path, tokenizer: Any) -> None:
        self.path, self._tokenizer = Path(path).expanduser(), tokenizer
        self._lines: dict[bytes, tuple[int, int]] = {}  # of a prompt: number and place of its line
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            place = 0
            for number, line in enumerate(iter(lambda: file.readline(LARGEST + 1), b""), 1):
                if len(line) > LARGEST:
                    raise self._odd(number, f"is longer than {LARGEST:,} bytes")
                if line.strip():
                    ids = self._ids(self._record(line, number), number)
                    self._lines[_key(ids)] = number, place
                place += len(line)

    def check(self, tokens: int) -> None:
        """A prompt may have any number of tokens; see `expect`."""

    def expect(self, prompts: Iterable[Sequence[int]], k: int) -> None:
        """See whether all of these prompts are in the file; those that are not are written down.

        Args:
            prompts: token ids.
            k: how many tokens are wanted at each position.

        Raises:
            InputError: some are not; the message names the file that they were written to.
        """
        wanted: set[bytes] = set()

        def unanswered() -> Iterator[list[int]]:
            for ids in prompts:
                if (key := _key(ids)) not in wanted and key not in self._lines:
                    yield [*ids]
                wanted.add(key)

        if not (missing := SpilledSequence(unanswered())):
            return
        to = self.path.with_name(f"{self.path.stem}.prompts.jsonl")

        def write(file: IO[bytes]) -> None:
            for ids in missing:
                file.write(json.dumps({"prompt_token_ids": ids}).encode() + b"\n")

        atomic_write(to, write)
        words = f"{self.path} answers {len(wanted) - len(missing)} of {len(wanted)} prompts"
        for ids in missing:
            if (found := self._lines.get(_key(ids[:-1]))) is not None:
                words += (
                    f" (line {found[0]} has one of the others, but without its last token, "
                    f"{ids[-1]}, which ends the text: it has to be in the prompt)"
                )
                break
        raise InputError(
            printable(
                f"{words}. The others were written to {to}, by the tokenizer of TEACHER_MODEL and "
                f"in parts of BLOCK_SIZE: have them answered with prompt_logprobs={k}, add what "
                f"comes to {self.path.name}, and start again"
            )
        )

    def _complete(self, prompt: Sequence[int], k: int) -> Callable[[], Any]:
        if (found := self._lines.get(_key(prompt))) is None:
            raise self._failed(f"has no answer to the prompt {short(list(prompt))}", prompt)
        number, place = found
        with self.path.open("rb") as file:
            file.seek(place)
            line = file.readline()
        return lambda: self._record(line, number)["prompt_logprobs"]

    def _failed(self, words: str, prompt: Sequence[int] = ()) -> InputError:
        number, _ = self._lines.get(_key(prompt), (0, 0))
        return self._odd(number, words)

    def _odd(self, number: int, words: str) -> InputError:
        return InputError(printable(f"{self.path}{f':{number}' if number else ''} {words}"))

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        """What a line holds."""
        try:
            found = read_json(line)
        except ValueError as error:
            raise self._odd(number, f"is {error}") from None
        if isinstance(found, dict) and isinstance(found.get("choices"), list):
            one = found["choices"][0] if len(found["choices"]) == 1 else None
            found = {**found, **one, "text": None} if isinstance(one, dict) else None
        if not isinstance(found, dict) or not isinstance(found.get("prompt_logprobs"), list):
            raise self._odd(number, f"has no list of prompt_logprobs: {short(found)}")
        return found

    def _ids(self, record: dict[str, Any], number: int) -> list[int]:
        """The tokens of a prompt."""
        text = record.get("text") or record.get("prompt")
        ids: Any = record.get("prompt_token_ids")
        if ids is None and isinstance(text, str):
            try:
                ids = self._tokenizer(text)["input_ids"]
            except (TypeError, UnicodeError):  # half of a surrogate pair, which JSON may have
                raise self._odd(number, f"has a text that is no Unicode: {short(text)}") from None
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
            raise self._odd(
                number, f"has no prompt_token_ids, and no text or prompt: {short(sorted(record))}"
            )
        if len(ids) != (n := len(record["prompt_logprobs"])):
            raise self._odd(
                number,
                f"has prompt_logprobs of {n} tokens, and the prompt has {len(ids)}: expected one "
                "for each, null for the first. From a text, the tokenizer is another one, or puts "
                "other tokens around it: give prompt_token_ids",
            )
        return ids


def _key(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=16).digest()
