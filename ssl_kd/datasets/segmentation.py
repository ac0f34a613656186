"""Two tokenizers on one text: where both cut it, and what stands between the cuts.

Each side is reduced to one number a token, its `ends`: the character after the smallest stretch of
text that holds the token and whose borders no token crosses. The common segmentation is then the
intersection of two sorted sets, and a batch of rows is aligned at once, without a loop over tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ssl_kd.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPACES = np.array([c for c in range(0x3001) if chr(c).isspace()])


def partition(text: str, offsets: np.ndarray, special: np.ndarray | None = None) -> np.ndarray:
    """Turn a tokenizer's offsets into a partition of the text.

    A cut stands between two tokens where no token before reaches beyond it and none after begins
    before it; tokens that overlap, such as the bytes of one character, stay together. Characters
    that no token claims (spaces that some offsets leave out, marks that normalisation composed,
    what a tokenizer drops) go to the token before, up to the first space; from there on to the
    token after.

    Args:
        text: what was tokenized, in characters (code points).
        offsets: `[token, 2]`, begin and end of each token.
        special: `[token]` bool, tokens that stand for no text (BOS, EOS); None for none.

    Returns:
        `[token]` int64, the end of the stretch that holds each token; 0 for a special one. It never
        falls from one token to the next, and the last is `len(text)`: stretch by stretch, every
        character is covered once.

    >>> partition("a cat", np.array([[0, 1], [2, 4], [3, 5]]))  # the space is left out; "a" twice
    array([1, 5, 5])
    """
    ends = np.zeros(len(offsets), dtype=np.int64)
    inside = np.arange(len(offsets)) if special is None else np.flatnonzero(~special)
    if not text or not len(inside):
        return ends
    begin, end = offsets[inside].T
    reach = np.maximum.accumulate(end)[:-1]
    ahead = np.minimum.accumulate(begin[::-1])[::-1][1:]
    characters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    spaces = np.append(np.flatnonzero(np.isin(characters, _SPACES)), len(text))
    cuts = np.minimum(spaces[np.searchsorted(spaces, reach)], ahead)
    clean = np.flatnonzero((reach <= ahead) & (cuts > 0) & (cuts < len(text)))
    # Of tokens without a width, those at a cut go to the stretch after it: a prefix before a word.
    cuts, first = np.unique(cuts[clean], return_index=True)
    stretch = np.searchsorted(clean[first], np.arange(len(inside)))
    ends[inside] = np.append(cuts, len(text))[stretch]
    return ends


class Alignment(NamedTuple):
    """The finest segmentation that two partitions share.

    Attributes:
        ends: `[group]`, the character after each group, ascending.
        student: `[token]`, the group of each student token, ascending; -1 for a special one.
        teacher: `[token']`, the same of the teacher.
    """

    ends: np.ndarray
    student: np.ndarray
    teacher: np.ndarray


def align(student_ends: np.ndarray, teacher_ends: np.ndarray) -> Alignment:
    """Group the tokens of two sides that cover the same characters.

    Args:
        student_ends: from `partition`; `[token]`, 0 for special tokens.
        teacher_ends: `[token']`, of the same text.

    Returns:
        The groups, none where one side has no token.

    >>> # BOS, "ab", "c", "de" and "a", "bc", "de"
    >>> align(np.array([0, 2, 3, 5]), np.array([1, 3, 5]))
    Alignment(ends=array([3, 5]), student=array([-1,  0,  0,  1]), teacher=array([0, 0, 1]))
    """
    common = np.intersect1d(student_ends, teacher_ends)
    common = common[common > 0]
    student, teacher = (
        np.where((ends > 0) & (len(common) > 0), np.searchsorted(common, ends), -1)
        for ends in (student_ends, teacher_ends)
    )
    return Alignment(common, student, teacher)


def check_fast(tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse a tokenizer that does not give the positions of its tokens.

    Raises:
        ValueError: it gives no offsets.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} gives no offsets: use a fast tokenizer, as "
            "AutoTokenizer.from_pretrained does where tokenizer.json is there"
        )


class TextReader:
    """A tokenizer with the positions of its tokens in the text.

    Some tokenizers drop characters that they do not know silently, and count the offsets
    after them too short. Such characters are found by asking once about each, and left out before
    tokenizing: the ids stay those of the text as it is (but for a space that a tokenizer prefixes
    to a text that begins with such a character), and the offsets are right.

    Args:
        tokenizer: a fast one.

    Raises:
        ValueError: it gives no offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        check_fast(tokenizer)
        self.tokenizer = tokenizer
        self._dropped: dict[str, bool] = {}

    def read(self, text: str, *, special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize a text.

        Args:
            text: any string without half surrogate pairs.
            special: with the tokens that the tokenizer itself puts around a text.

        Returns:
            ids and ends, `[token]` int64 each; see `partition`.
        """
        dropped = self._drops(text)
        kept = [i for i, c in enumerate(text) if c not in dropped] if dropped else range(len(text))
        encoded: Any = self.tokenizer(
            "".join(text[i] for i in kept) if dropped else text,
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        empty = offsets[:, 0] == offsets[:, 1]
        if dropped:
            begins, ends = np.array([*kept, len(text)]), np.array([0, *(i + 1 for i in kept)])
            offsets = np.stack([begins[offsets[:, 0]], ends[offsets[:, 1]]], axis=1)
        # A space may have no width either, and is text: the tokenizer's own mask decides.
        outside = empty & np.array(encoded["special_tokens_mask"], dtype=bool)
        return np.array(encoded["input_ids"], dtype=np.int64), partition(text, offsets, outside)

    def _drops(self, text: str) -> set[str]:
        """Characters of the text that leave no trace between two others."""
        present = set(text)
        new = sorted(present - self._dropped.keys())
        if new:
            ids: Any = self.tokenizer(
                ["xx", *(f"x{c}x" for c in new)], add_special_tokens=False, verbose=False
            )["input_ids"]
            known = self.tokenizer.unk_token_id not in ids[0]
            self._dropped.update(
                (c, known and i == ids[0]) for c, i in zip(new, ids[1:], strict=True)
            )
        return {c for c in present if self._dropped[c]}
