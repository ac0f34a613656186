"""Map the tokens of two vocabularies to the token texts that both contain."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.language.losses.cross_tokenizer import VocabularyMap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def token_texts(tokenizer: PreTrainedTokenizerFast) -> list[bytes | None]:
    """Return the text of each token as bytes; None for special tokens.

    The texts of byte-level BPE, SentencePiece with byte tokens, and WordPiece are comparable. In
    WordPiece, a word includes the space before it.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())
    kinds = {
        step.get("type")
        for name in ("pre_tokenizer", "decoder")
        for part in [model.get(name) or {}]
        for step in [part, *part.get("pretokenizers", []), *part.get("decoders", [])]
    }
    special = set(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    texts: list[bytes | None] = [None] * len(tokenizer)
    added = tokenizer.added_tokens_decoder
    for token, i in tokenizer.get_vocab().items():
        if i in special or i >= len(texts):
            continue
        if i in added:
            texts[i] = token.encode()
        elif "ByteLevel" in kinds:
            texts[i] = bytes(_BYTE_OF[c] for c in token) if set(token) <= _BYTE_OF.keys() else None
        elif "WordPiece" in kinds:
            texts[i] = (token[2:] if token.startswith("##") else f" {token}").encode()
        elif len(token) == 6 and token.startswith("<0x"):
            texts[i] = bytes([int(token[3:5], 16)])
        else:
            texts[i] = token.replace("▁", " ").encode()
    return texts


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that represent bytes in byte-level BPE (Radford et al., 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class SharedVocabulary(NamedTuple):
    """Classes of the tokens of two vocabularies, one class per token text that both contain.

    A token that only one vocabulary contains belongs to the class of its longest prefix that is a
    common text. For example, if the teacher has " Lily" and the student only " L", the teacher's
    probability of " Lily" is added to that of " L". Dropping it would train the student never to
    predict names.
    """

    student: VocabularyMap
    teacher: VocabularyMap
    student_exact: Tensor  # [token], whether the text equals that of the class
    teacher_exact: Tensor  # [token]

    def same_text(self, student_ids: Tensor, teacher_ids: Tensor) -> Tensor:
        """Return for each pair of tokens whether the texts are equal, bool `[n]`."""
        alike = self.student.classes[student_ids] == self.teacher.classes[teacher_ids]
        return alike & self.student_exact[student_ids] & self.teacher_exact[teacher_ids]

    def to(self, device: torch.device | str) -> SharedVocabulary:
        """Copy the tensors to a device."""
        student, teacher = (VocabularyMap(m.classes.to(device), m.size) for m in self[:2])
        return SharedVocabulary(
            student, teacher, self.student_exact.to(device), self.teacher_exact.to(device)
        )


def shared_vocabulary(
    student_tokenizer: PreTrainedTokenizerFast, teacher_tokenizer: PreTrainedTokenizerFast
) -> SharedVocabulary:
    """Map the tokens of two vocabularies to their common texts; raise InputError if none exist."""
    sides = [token_texts(student_tokenizer), token_texts(teacher_tokenizer)]
    common = sorted((set(sides[0]) & set(sides[1])) - {None, b""})  # pyright: ignore[reportArgumentType]
    if not common:
        raise InputError("the two vocabularies have no token text in common: set ALIGN to 'uld'")
    number = {text: i for i, text in enumerate(common)}
    maps, exact = [], []
    for texts in sides:
        classes = [_longest(text, number) for text in texts]
        maps.append(VocabularyMap(torch.tensor(classes), len(common)))
        exact.append(torch.tensor([text in number for text in texts]))
    return SharedVocabulary(*maps, *exact)


def _longest(text: bytes | None, number: dict[bytes | None, int]) -> int:
    for stop in range(len(text or b""), 0, -1):
        if (common := number.get(text[:stop])) is not None:  # pyright: ignore[reportOptionalSubscript]
            return common
    return len(number)
