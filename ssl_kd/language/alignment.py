"""Two tokenizers on one text: where both cut it, and what stands between the cuts.

Each side is reduced to one number a token, its `ends`: the character after the smallest stretch of
text that holds the token and whose borders no token crosses. The common segmentation is then the
intersection of two sorted sets, and a batch of rows is aligned at once, without a loop over tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssl_kd.datasets.text import Example, TextDataset, first_few
from ssl_kd.language.blocks import Batch, Blocks
from ssl_kd.losses.cross_tokenizer import Positions, VocabularyMap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "AlignedBatch",
    "AlignedBlocks",
    "Alignment",
    "Overlap",
    "SharedVocabulary",
    "TextReader",
    "align",
    "aligned_blocks",
    "overlaps",
    "partition",
    "shared_vocabulary",
    "token_texts",
]

logger = logging.getLogger(__name__)

SLICE = 256  # rows that the statistics look at together
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


class Overlap(NamedTuple):
    """Pairs of tokens that share characters.

    Attributes:
        student: `[pair]`, index of the student's token.
        teacher: `[pair]`, index of the teacher's token.
        weight: `[pair]`, share of the student token's characters; sums to one per student token.
    """

    student: np.ndarray
    teacher: np.ndarray
    weight: np.ndarray


def overlaps(student_ends: np.ndarray, teacher_ends: np.ndarray) -> Overlap:
    """Which teacher tokens each student token shares characters with, and how many.

    Tokens of one stretch (the bytes of a character) have all its characters; as a teacher's they
    share them in equal parts.

    Args:
        student_ends: as in `align`.
        teacher_ends: as in `align`.

    >>> overlaps(np.array([2, 3]), np.array([1, 3])).weight  # "ab", "c" and "a", "bc"
    array([0.5, 0.5, 1. ])
    """
    if not (student_ends.any() and teacher_ends.any()):
        empty = np.zeros(0, dtype=np.int64)
        return Overlap(empty, empty, empty.astype(np.float64))
    every = np.union1d(student_ends, teacher_ends)
    every = every[every > 0]
    length = np.diff(every, prepend=0)
    sides = []
    for ends in (student_ends, teacher_ends):
        tokens = np.flatnonzero(ends)
        stretches, first, count = np.unique(ends[tokens], return_index=True, return_counts=True)
        of = np.searchsorted(stretches, every)  # the stretch that holds each piece
        sides.append((tokens, first[of], count[of], np.diff(stretches, prepend=0)[of]))
    (s_tokens, s_first, s_count, s_length), (t_tokens, t_first, t_count, _) = sides
    pairs = s_count * t_count
    piece = np.repeat(np.arange(len(every)), pairs)
    number = np.arange(len(piece)) - (np.cumsum(pairs) - pairs)[piece]
    return Overlap(
        s_tokens[s_first[piece] + number // t_count[piece]],
        t_tokens[t_first[piece] + number % t_count[piece]],
        (length / (s_length * t_count))[piece],
    )


class TextReader:
    """A tokenizer that says where its tokens stand in the text.

    Some tokenizers drop characters that they do not know without a word, and count the offsets
    after them too short. Such characters are found by asking once about each, and left out before
    tokenizing: the ids stay those of the text as it is (but for a space that a tokenizer prefixes
    to a text that begins with such a character), and the offsets are right.

    Args:
        tokenizer: a fast one.

    Raises:
        ValueError: it gives no offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} gives no offsets: use a fast tokenizer, as "
                "AutoTokenizer.from_pretrained does where tokenizer.json is there"
            )
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


def token_texts(tokenizer: PreTrainedTokenizerFast) -> list[bytes | None]:
    """What text each token stands for, as bytes; None for special tokens.

    Byte-level BPE, SentencePiece with byte tokens, and WordPiece (where a word brings the space
    before it along) come to the same form.
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
    """The characters that byte-level BPE writes bytes with (Radford et al., 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class SharedVocabulary(NamedTuple):
    """Two vocabularies carried onto the token texts that both have.

    A token that only one side has counts as the longest common text it begins with: where the
    teacher says " Lily" and the student must say " L" first, the teacher's mass goes to " L".
    Leaving such mass out would teach the student that names never come.

    Attributes:
        student: class of each student token.
        teacher: class of each teacher token.
        student_exact: `[tokens]` bool, its text is that of its class.
        teacher_exact: the same of the teacher.
    """

    student: VocabularyMap
    teacher: VocabularyMap
    student_exact: Tensor
    teacher_exact: Tensor

    def same_text(self, student_ids: Tensor, teacher_ids: Tensor) -> Tensor:
        """Whether the tokens of each pair stand for the same text; `[n]` bool."""
        alike = self.student.classes[student_ids] == self.teacher.classes[teacher_ids]
        return alike & self.student_exact[student_ids] & self.teacher_exact[teacher_ids]

    def to(self, device: torch.device | str) -> SharedVocabulary:
        """The same on a device."""
        student, teacher = (VocabularyMap(m.classes.to(device), m.size) for m in self[:2])
        return SharedVocabulary(
            student, teacher, self.student_exact.to(device), self.teacher_exact.to(device)
        )


def shared_vocabulary(
    student_tokenizer: PreTrainedTokenizerFast, teacher_tokenizer: PreTrainedTokenizerFast
) -> SharedVocabulary:
    """Find what two vocabularies have in common.

    Raises:
        ValueError: they have no text of a token in common.
    """
    sides = [token_texts(student_tokenizer), token_texts(teacher_tokenizer)]
    common = sorted((set(sides[0]) & set(sides[1])) - {None, b""})  # pyright: ignore[reportArgumentType]
    if not common:
        raise ValueError("the two vocabularies have no token text in common: use align 'uld'")
    number = {text: i for i, text in enumerate(common)}
    maps, exact = [], []
    for texts in sides:
        classes = [_longest(text, number) for text in texts]
        maps.append(VocabularyMap(torch.tensor(classes), len(common)))
        exact.append(torch.tensor([text in number for text in texts]))
    return SharedVocabulary(*maps, *exact)


def _longest(text: bytes | None, number: dict[bytes | None, int]) -> int:
    for stop in range(len(text or b""), 0, -1):
        if (found := number.get(text[:stop])) is not None:  # pyright: ignore[reportOptionalSubscript]
            return found
    return len(number)


@dataclass(frozen=True)
class AlignedBatch:
    """Rows of the same text, for both models.

    Attributes:
        student: what the student gets, and what of it counts for the cross-entropy.
        teacher: what the teacher gets.
        ids: `[B, T]` of the student and `[B, T']` of the teacher, on the CPU as all below.
        ends: of the same shapes; ends within the row.
        counts: `[B, T]`, as in `student`.
        vocabulary: what the two vocabularies have in common.
    """

    student: Batch
    teacher: Batch
    ids: tuple[np.ndarray, np.ndarray]
    ends: tuple[np.ndarray, np.ndarray]
    counts: np.ndarray
    vocabulary: SharedVocabulary

    def _joined(self) -> tuple[np.ndarray, np.ndarray]:
        """The ends of all rows as if they were one text, flattened."""
        length = self.ends[0].max(1, initial=0)
        before = (np.cumsum(length) - length)[:, None]
        student, teacher = (np.where(e > 0, e + before, 0).ravel() for e in self.ends)
        return student, teacher

    def groups(self) -> Groups:
        """The groups that count, for `uld` and `chunk_matching`.

        Every student token of such a group counts, and on both sides a token stands before its
        first one, to predict it.
        """
        aligned = align(*self._joined())
        size, device = len(aligned.ends), self.student.input_ids.device
        tokens = [np.flatnonzero(side >= 0) for side in (aligned.student, aligned.teacher)]
        of = [aligned.student[tokens[0]], aligned.teacher[tokens[1]]]
        firsts = [tokens[k][np.searchsorted(of[k], np.arange(size))] for k in (0, 1)]
        counted = self.counts.ravel()[tokens[0]]
        kept = np.bincount(of[0], ~counted, minlength=size) == 0
        for k in (0, 1):
            kept &= firsts[k] % self.ids[k].shape[1] > 0
        number = np.cumsum(kept) - 1
        sides = []
        for k in (0, 1):
            chosen = kept[of[k]]
            rows, group = tokens[k][chosen] - 1, number[of[k][chosen]]
            first = np.searchsorted(group, np.arange(kept.sum()))
            sides.append(
                Positions(
                    torch.from_numpy(rows).to(device),
                    torch.from_numpy(self.ids[k].ravel()[rows + 1]).to(device),
                    torch.from_numpy(group).to(device),
                    torch.from_numpy(first).to(device),
                )
            )
        single = [np.bincount(of[k], minlength=size) == 1 for k in (0, 1)]
        one_to_one = (single[0] & single[1])[kept]
        token = [torch.from_numpy(self.ids[k].ravel()[firsts[k][kept]]) for k in (0, 1)]
        matched = torch.from_numpy(one_to_one) & self.vocabulary.same_text(*token)
        return Groups(
            sides[0],
            sides[1],
            matched.to(device),
            torch.from_numpy(one_to_one).to(device),
            torch.from_numpy(np.diff(aligned.ends, prepend=0)[kept]).to(device),
        )

    def overlap(self) -> tuple[Tensor, Tensor, Tensor]:
        """For `hidden_matching`: pairs of tokens that share characters, and their weights.

        Returns:
            `[pair]` each: rows of the flattened hidden states of the student and of the teacher,
            int64, and weights, float32. Of student tokens those that count.
        """
        device = self.student.input_ids.device
        pairs = overlaps(*self._joined())
        counted = self.counts.ravel()[pairs.student]
        student, teacher, weight = (torch.from_numpy(array[counted]).to(device) for array in pairs)
        return student, teacher, weight.float()


@dataclass(frozen=True)
class Groups:
    """The groups of a batch that count.

    Attributes:
        student: where the student predicts them.
        teacher: where the teacher predicts them.
        matched: `[G]` bool, one token stands against one of the same text.
        one_to_one: `[G]` bool, one token stands against one.
        characters: `[G]` int64, of each group.
    """

    student: Positions
    teacher: Positions
    matched: Tensor
    one_to_one: Tensor
    characters: Tensor

    def __len__(self) -> int:
        return len(self.matched)


@dataclass(frozen=True)
class AlignedBlocks:
    """The same pieces of text for two tokenizers, a piece a row.

    Attributes:
        student: its tokens, as `make_blocks` would lay them out without packing.
        teacher: the teacher's tokens of the same characters.
        ends: int32 `[n, T]` and `[n, T']`: `partition` within the row; 0 for special tokens,
            context and padding.
        vocabulary: what the two vocabularies have in common.
        characters: of the groups that hold something to learn, also those that no block can hold.
    """

    student: Blocks
    teacher: Blocks
    ends: tuple[Tensor, Tensor]
    vocabulary: SharedVocabulary
    characters: int

    def __len__(self) -> int:
        return len(self.student)

    @property
    def digest(self) -> str:
        """SHA-256 of both sides."""
        return hashlib.sha256((self.student.digest + self.teacher.digest).encode()).hexdigest()

    def batch(
        self, rows: Sequence[int] | Tensor, device: torch.device | str | None = None
    ) -> AlignedBatch:
        """Gather rows; see `Blocks.batch`."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        batches = self.student.batch(rows, device), self.teacher.batch(rows, device)
        ids, ends = (
            tuple(
                all_rows[rows, : batch.input_ids.shape[1]].numpy()
                for all_rows, batch in zip(sides, batches, strict=True)
            )
            for sides in ((self.student.ids, self.teacher.ids), self.ends)
        )
        counts = self.student.counts[rows, : ids[0].shape[1]].numpy()
        return AlignedBatch(*batches, ids, ends, counts, self.vocabulary)  # pyright: ignore[reportArgumentType]

    def statistics(self) -> dict[str, float]:
        """How well the two tokenizers fit, over all rows.

        Returns:
            `coverage`, `one_to_one`, `matched`: shares of the characters to learn that stand in a
            group, in one of one token against one, in one of two tokens of the same text.
            `groups`; `student_tokens_per_group`, `teacher_tokens_per_group`,
            `characters_per_group`: means; `longest_group`: in characters.
        """
        n = students = teachers = covered = one_to_one = matched = longest = 0
        for rows in torch.arange(len(self)).split(SLICE):
            groups = self.batch(rows).groups()
            n += len(groups)
            students += len(groups.student.rows)
            teachers += len(groups.teacher.rows)
            covered += int(groups.characters.sum())
            one_to_one += int(groups.characters[groups.one_to_one].sum())
            matched += int(groups.characters[groups.matched].sum())
            longest = max([longest, *groups.characters.tolist()])
        every, each = max(self.characters, 1), max(n, 1)
        return {
            "coverage": covered / every,
            "one_to_one": one_to_one / every,
            "matched": matched / every,
            "groups": float(n),
            "student_tokens_per_group": students / each,
            "teacher_tokens_per_group": teachers / each,
            "characters_per_group": covered / each,
            "longest_group": float(longest),
        }


class _Side(NamedTuple):
    """One tokenizer, and what stands around a document in its ids; see `make_blocks`."""

    reader: TextReader
    before_text: list[int]
    before_prompt: list[int]
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> _Side:
        reader = TextReader(tokenizer)
        bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        if end is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} names no token that ends a document: "
                "set tokenizer.eos_token"
            )
        adds = bos is not None and tokenizer("")["input_ids"][:1] == [bos]
        start = end if bos is None else bos
        return cls(reader, [start], [start] if adds else [], end)


class _Row(NamedTuple):
    ids: np.ndarray
    ends: np.ndarray
    counts: np.ndarray


def aligned_blocks(
    dataset: TextDataset,
    student_tokenizer: PreTrainedTokenizerFast,
    teacher_tokenizer: PreTrainedTokenizerFast,
    block_size: int,
    *,
    teacher_block_size: int | None = None,
) -> AlignedBlocks:
    """Turn documents into rows that hold the same characters for two tokenizers.

    How well the tokenizers fit (`AlignedBlocks.statistics`) is logged.

    Both sides follow `make_blocks` with `packing=False`: start token, text, end token; the prompt
    does not count. A document that is too long for either side loses the beginning of its prompt
    and is cut where both sides cut it; each further part begins with the token before it, as
    context that does not count.

    Args:
        dataset: texts, or prompts with completions. Chat messages are left out: two chat templates
            do not give the same characters.
        student_tokenizer: a fast one with an EOS.
        teacher_tokenizer: the same.
        block_size: tokens in a row, at least 3.
        teacher_block_size: of the teacher; None for the same.

    Raises:
        ValueError: a tokenizer that is not fast or lacks an EOS, no common text of tokens, a block
            size below 3, or a data set of which nothing is left.
    """
    sizes = (block_size, block_size if teacher_block_size is None else teacher_block_size)
    if min(sizes) < 3:
        raise ValueError(f"block sizes must be at least 3 (context, token, end): {sizes}")
    sides = (_Side.of(student_tokenizer), _Side.of(teacher_tokenizer))
    vocabulary = shared_vocabulary(student_tokenizer, teacher_tokenizer)
    rows: list[tuple[_Row, _Row]] = []
    characters: list[int] = []
    left_out: list[str] = []
    total = 0
    for example in dataset.examples:
        if example.messages is not None:
            left_out.append(
                f"{example.where}: messages; the chat templates of two tokenizers differ: write "
                "prompt and completion"
            )
            continue
        prompt, completion = example.prompt or "", example.completion or ""
        text = example.text if example.text is not None else prompt + completion
        read = [side.reader.read(text) for side in sides]
        if not all(len(ids) for ids, _ in read):
            left_out.append(f"{example.where}: one of the tokenizers makes no token of it")
            continue
        document = _Document.of(example, len(prompt), read, sides)
        parts = list(document.cut(sizes))
        for part in parts:
            rows.append((document.row(0, *part), document.row(1, *part)))
            characters.append(document.learned(*part))
        lost = len(text) - len(prompt) - sum(document.learned(*part) for part in parts)
        total += document.characters()
        if lost or len(parts) > 1:
            counted = " and ".join(str(len(ids)) for ids, _ in read)
            left_out.append(
                f"{example.where}: {counted} tokens for blocks of {' and '.join(map(str, sizes))}: "
                f"in {len(parts)} parts"
                + (f", without {lost} characters that no block can hold" if lost else "")
            )
    if not rows:
        raise ValueError(f"{dataset.name}: no row is left: {'; '.join(first_few(left_out, 3))}")
    student, teacher = (
        _lay_out([row[k] for row in rows], sizes[k], sides[k].end, characters, left_out)
        for k in (0, 1)
    )
    blocks = AlignedBlocks(student[0], teacher[0], (student[1], teacher[1]), vocabulary, total)
    fit = blocks.statistics()
    logger.info(
        "%s: groups cover %.1f %% of the characters to learn, %.1f %% by tokens of the same text; "
        "in a group %.2f tokens of the student, %.2f of the teacher, %.1f characters, at most %.0f",
        dataset.name,
        100 * fit["coverage"],
        100 * fit["matched"],
        fit["student_tokens_per_group"],
        fit["teacher_tokens_per_group"],
        fit["characters_per_group"],
        fit["longest_group"],
    )
    return blocks


@dataclass(frozen=True)
class _Document:
    """A text in tokens of both sides; what follows `begin` is to be learned."""

    begin: int
    ends: np.ndarray  # of the groups
    bounds: list[np.ndarray]  # for each side, the first token of each group, and the end
    read: list[tuple[np.ndarray, np.ndarray]]
    before: list[list[int]]
    after: list[int]

    @classmethod
    def of(
        cls,
        example: Example,
        begin: int,
        read: list[tuple[np.ndarray, np.ndarray]],
        sides: tuple[_Side, _Side],
    ) -> _Document:
        ends, *groups = align(read[0][1], read[1][1])
        bounds = [np.searchsorted(group, np.arange(len(ends) + 1)) for group in groups]
        as_text = [example.text is not None or not (begin or side.before_prompt) for side in sides]
        before = [
            side.before_text if text else side.before_prompt
            for side, text in zip(sides, as_text, strict=True)
        ]
        return cls(begin, ends, bounds, read, before, [side.end for side in sides])

    def cut(self, sizes: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Ranges of groups that fit both sides, with a token of context and the end token."""
        rooms = [size - 2 for size in sizes]
        both = list(zip(self.bounds, rooms, strict=True))
        whole_from = max(int(np.searchsorted(b, b[-1] - room)) for b, room in both)
        start = min(whole_from, self._first_learned())
        while start < len(self.ends):
            stop = min(int(np.searchsorted(b, b[start] + room, "right")) - 1 for b, room in both)
            if stop > start:
                yield start, stop
            start = max(stop, start + 1)  # a group that no block can hold is left out

    def learned(self, start: int, stop: int) -> int:
        """Characters to learn in a range of groups."""
        return int(self.ends[stop - 1]) - max(self.begin, self._edge(start))

    def characters(self) -> int:
        """Characters of the groups that hold something to learn."""
        return int(self.ends[-1]) - self._edge(self._first_learned())

    def _first_learned(self) -> int:
        return int(np.searchsorted(self.ends, self.begin, "right"))

    def _edge(self, start: int) -> int:
        return int(self.ends[start - 1]) if start else 0

    def row(self, side: int, start: int, stop: int) -> _Row:
        ids, ends = self.read[side]
        part = slice(*self.bounds[side][[start, stop]])
        before = list(ids[part.start - 1 : part.start]) if start else self.before[side]
        after = [self.after[side]] if stop == len(self.ends) else []
        around = (len(before), len(after))
        counts = np.pad(ends[part] > self.begin, around)
        counts[len(counts) - len(after) :] = True
        counts[0] = False  # nothing predicts it
        return _Row(
            np.array([*before, *ids[part], *after], dtype=np.int64),
            np.pad(ends[part] - self._edge(start), around),
            counts,
        )


def _lay_out(
    rows: Sequence[_Row],
    size: int,
    padding: int,
    characters: Sequence[int],
    left_out: Sequence[str],
) -> tuple[Blocks, Tensor]:
    shape = (len(rows), size)
    ids = np.full(shape, padding, dtype=np.int64)
    ends = np.zeros(shape, dtype=np.int32)
    counts = np.zeros(shape, dtype=bool)
    documents = np.zeros(shape, dtype=np.int32)
    for r, row in enumerate(rows):
        part = slice(len(row.ids))
        ids[r, part], ends[r, part], counts[r, part], documents[r, part] = *row, 1
    digest = hashlib.sha256(repr(shape).encode())
    for array in (ids, ends, counts):
        digest.update(array.tobytes())
    blocks = Blocks(
        torch.from_numpy(ids),
        torch.from_numpy(counts),
        torch.from_numpy(documents),
        torch.tensor(characters),
        first_few(left_out),
        digest.hexdigest(),
    )
    return blocks, torch.from_numpy(ends)
