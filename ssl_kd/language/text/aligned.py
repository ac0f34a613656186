"""Tokenize the same text for a student and a teacher with different vocabularies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from ssl_kd.core.errors import InputError, first_few
from ssl_kd.core.files.spill import SpilledSequence, filled_array
from ssl_kd.language.losses.cross_tokenizer import Positions
from ssl_kd.language.text.blocks import Batch, Blocks, Frame, digest_of, framed
from ssl_kd.language.text.dataset import MOST_NAMED, TextDataset
from ssl_kd.language.text.segmentation import TextReader, align, byte_positions
from ssl_kd.language.text.shares import Layout
from ssl_kd.language.text.vocabulary import SharedVocabulary, shared_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SLICE = 256  # rows processed at once by `statistics`


@dataclass(frozen=True)
class AlignedBatch:
    """A batch of rows that contain the same text for the student and the teacher."""

    student: Batch
    teacher: Batch
    ids: tuple[np.ndarray, np.ndarray]  # of student [B, T] and teacher [B, T'], on the CPU
    ends: tuple[np.ndarray, np.ndarray]  # of the same shapes, see `AlignedBlocks`
    counts: np.ndarray  # [B, T], whether each student token is a target
    vocabulary: SharedVocabulary

    @property
    def rows(self) -> Tensor:
        """Row numbers in the data set, int64 `[B]`."""
        return self.student.rows

    def groups(self) -> Groups:
        """Return the groups of tokens that are used for distillation.

        All student tokens of such a group are targets, and both rows have a token before the group
        to predict its first token.
        """
        length = self.ends[0].max(1, initial=0)
        before = (np.cumsum(length) - length)[:, None]  # as if the rows were one text
        aligned = align(*(np.where(e > 0, e + before, 0).ravel() for e in self.ends))
        size, device = len(aligned.ends), self.student.input_ids.device

        def moved(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        tokens = [np.flatnonzero(side >= 0) for side in (aligned.student, aligned.teacher)]
        group_of = [aligned.student[tokens[0]], aligned.teacher[tokens[1]]]
        firsts = [tokens[k][np.searchsorted(group_of[k], np.arange(size))] for k in (0, 1)]
        counted = self.counts.ravel()[tokens[0]]
        is_used = np.bincount(group_of[0], ~counted, minlength=size) == 0
        for k in (0, 1):
            is_used &= firsts[k] % self.ids[k].shape[1] > 0
        number = np.cumsum(is_used) - 1
        sides = []
        for k in (0, 1):
            chosen = is_used[group_of[k]]
            rows, group = tokens[k][chosen] - 1, number[group_of[k][chosen]]
            first = np.searchsorted(group, np.arange(is_used.sum()))
            ids = self.ids[k].ravel()[rows + 1]
            sides.append(Positions(moved(rows), moved(ids), moved(group), moved(first)))
        single = [np.bincount(group_of[k], minlength=size) == 1 for k in (0, 1)]
        one_to_one = (single[0] & single[1])[is_used]
        token = [torch.from_numpy(self.ids[k].ravel()[firsts[k][is_used]]) for k in (0, 1)]
        matched = torch.from_numpy(one_to_one) & self.vocabulary.same_text(*token)
        n_bytes = np.diff(aligned.ends, prepend=0)[is_used]
        left, right = sides
        return Groups(left, right, matched.to(device), moved(one_to_one), moved(n_bytes))


@dataclass(frozen=True)
class Groups:
    """Groups of student and teacher tokens that cover the same text."""

    student: Positions  # where the student predicts the tokens of the groups
    teacher: Positions  # where the teacher predicts the tokens of the groups
    matched: Tensor  # bool [G], one student and one teacher token of equal text
    one_to_one: Tensor  # bool [G], one student and one teacher token
    n_bytes: Tensor  # int64 [G], UTF-8 bytes of text in each group

    def __len__(self) -> int:
        return len(self.matched)


@dataclass(frozen=True)
class AlignedBlocks:
    """Token rows of a student and a teacher; row i contains the same text for both.

    `ends` is int32 `[n, T]` of the student and `[n, T']` of the teacher: for each token, the end in
    UTF-8 bytes of the smallest piece of the row's text whose boundaries no token crosses; 0 for
    special tokens, context and padding.
    """

    student: Blocks
    teacher: Blocks
    ends: tuple[Tensor, Tensor]
    vocabulary: SharedVocabulary
    n_bytes: int  # of text to train on, including those that fit in no row

    def __len__(self) -> int:
        return len(self.student)

    @property
    def digest(self) -> str:
        """SHA-256 of the rows of student and teacher."""
        return hashlib.sha256((self.student.digest + self.teacher.digest).encode()).hexdigest()

    def first(self, n: int) -> Self:
        """Return the first `n` rows, with a digest of their own."""
        student, teacher = self.student.first(n), self.teacher.first(n)
        ends = self.ends[0][:n], self.ends[1][:n]
        n_bytes = student.target_bytes
        return replace(self, student=student, teacher=teacher, ends=ends, n_bytes=n_bytes)

    def batch(
        self, rows: Sequence[int] | Tensor, device: torch.device | str | None = None
    ) -> AlignedBatch:
        """Gather rows on a device."""
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
        """Measure over all rows how well the two tokenizations match.

        `coverage`, `one_to_one` and `matched` are fractions of the bytes to train on: in any
        group, in a group of one student and one teacher token, and in such a group of equal text.
        The others are means.
        """
        n = students = teachers = covered = one_to_one = matched = 0
        for rows in torch.arange(len(self)).split(SLICE):
            groups = self.batch(rows).groups()
            n += len(groups)
            students += len(groups.student.rows)
            teachers += len(groups.teacher.rows)
            covered += int(groups.n_bytes.sum())
            one_to_one += int(groups.n_bytes[groups.one_to_one].sum())
            matched += int(groups.n_bytes[groups.matched].sum())
        total, n = max(self.n_bytes, 1), max(n, 1)
        return {
            "coverage": covered / total,
            "one_to_one": one_to_one / total,
            "matched": matched / total,
            "student_tokens_per_group": students / n,
            "teacher_tokens_per_group": teachers / n,
            "bytes_per_group": covered / n,
        }


class _Row(NamedTuple):
    ids: np.ndarray
    counts: np.ndarray
    ends: np.ndarray


def aligned_blocks(
    dataset: TextDataset,
    student_tokenizer: PreTrainedTokenizerFast,
    teacher_tokenizer: PreTrainedTokenizerFast,
    block_size: int,
) -> AlignedBlocks:
    """Tokenize documents into rows for a student and a teacher, which cover the same text.

    Both tokenizations follow `make_blocks` with `packing=False`. If a document is too long for
    either, the beginning of its prompt is cut off; if it is still too long, it is split where both
    have a token boundary. Each further part begins with the token before it, as context that is not
    a target. Chat messages are left out, since the two chat templates produce different text.
    """
    dataset.check_text_alone()
    tokenizers = (student_tokenizer, teacher_tokenizer)
    readers = [TextReader(tokenizer) for tokenizer in tokenizers]
    frames = [Frame.of(tokenizer) for tokenizer in tokenizers]
    vocabulary = shared_vocabulary(student_tokenizer, teacher_tokenizer)
    row_bytes: list[int] = []
    layout = Layout()
    total = 0

    def cut_up() -> Iterator[tuple[_Row, _Row]]:
        nonlocal total
        for where, length, document in _documents(dataset, readers, frames, layout.left_out):
            parts = list(document.cut(block_size - 2))
            learned = [document.learned(*part) for part in parts]
            row_bytes.extend(learned)
            total += document.n_bytes()
            yield from ((document.row(0, *part), document.row(1, *part)) for part in parts)
            layout.documents += 1
            if (lost := length - sum(learned)) or len(parts) > 1:
                lengths = " and ".join(str(len(ids)) for ids, _ in document.read)
                layout.split.append(
                    f"{where}: the document has {lengths} tokens (block_size {block_size}) and is "
                    f"split into {len(parts)} parts"
                    + (f", without {lost} bytes that fit in no row" if lost else "")
                )

    rows = SpilledSequence(cut_up())
    if not rows:
        reasons = "; ".join(first_few(layout.messages, 3))
        raise InputError(f"{dataset.name} contains no usable document: {reasons}")
    student, teacher = (
        _lay_out(rows, k, block_size, frames[k].end, row_bytes, layout) for k in (0, 1)
    )
    return AlignedBlocks(student[0], teacher[0], (student[1], teacher[1]), vocabulary, total)


def _documents(
    dataset: TextDataset,
    readers: Sequence[TextReader],
    frames: Sequence[Frame],
    left_out: list[str],
) -> Iterator[tuple[str, int, _Document]]:
    """Yield the position, the number of bytes to train on, and the tokens of each document."""
    for example in dataset.examples:
        if example.messages is not None:
            left_out.append(
                f"{example.where}: chat messages are left out, since the chat templates of student "
                "and teacher differ: use prompt and completion"
            )
            continue
        prompt, completion = example.prompt or "", example.completion or ""
        text = example.text if example.text is not None else prompt + completion
        positions = byte_positions(text)
        begin = int(positions[len(prompt)])
        read = [(ids, positions[ends]) for ids, ends in (each.read(text) for each in readers)]
        if not all(len(ids) for ids, _ in read):
            left_out.append(f"{example.where}: one of the tokenizers returns no tokens")
            continue
        around = [frame.around(example) for frame in frames]
        yield example.where, int(positions[-1]) - begin, _Document(begin, read, around)


class _Document:
    """A text in tokens of both tokenizers, positions in bytes; it is learned from `begin` on."""

    def __init__(
        self,
        begin: int,
        read: list[tuple[np.ndarray, np.ndarray]],
        around: list[tuple[list[int], list[int]]],
    ) -> None:
        self.begin = begin
        self.read = read
        self.around = around
        self.ends, *groups = align(read[0][1], read[1][1])  # end of each group
        # per tokenizer: first token of each group, and the number of tokens
        self.bounds = [np.searchsorted(group, np.arange(len(self.ends) + 1)) for group in groups]

    def cut(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of groups that have at most `most` tokens for each tokenizer."""
        whole_from = max(int(np.searchsorted(b, b[-1] - most)) for b in self.bounds)
        start = min(whole_from, self._first_learned())
        while start < len(self.ends):
            ends = [np.searchsorted(b, b[start] + most, "right") for b in self.bounds]
            stop = int(min(ends)) - 1
            if stop > start:
                yield start, stop
            start = max(stop, start + 1)  # a group longer than a row is left out

    def learned(self, start: int, stop: int) -> int:
        return int(self.ends[stop - 1]) - max(self.begin, self._edge(start))

    def n_bytes(self) -> int:
        return int(self.ends[-1]) - self._edge(self._first_learned())

    def _first_learned(self) -> int:
        return int(np.searchsorted(self.ends, self.begin, "right"))

    def _edge(self, start: int) -> int:
        return int(self.ends[start - 1]) if start else 0

    def row(self, side: int, start: int, stop: int) -> _Row:
        ids, ends = self.read[side]
        part = slice(*self.bounds[side][[start, stop]])
        before, after = self.around[side]
        if start:  # the preceding token, as context
            before = list(ids[part.start - 1 : part.start])
        if stop < len(self.ends):
            after = []
        counts, ends_in_row = ends[part] > self.begin, ends[part] - self._edge(start)
        return _Row(*framed((before, after), ids[part], counts, ends_in_row))


def _lay_out(
    rows: Sequence[tuple[_Row, _Row]],
    side: int,
    size: int,
    padding: int,
    row_bytes: Sequence[int],
    layout: Layout,
) -> tuple[Blocks, Tensor]:
    shape = len(rows), size
    ids = filled_array(*shape, np.int64, padding)
    ends, documents = (filled_array(*shape, np.int32) for _ in range(2))
    counts = filled_array(*shape, np.bool_)
    for place, sides in enumerate(rows):
        row = sides[side]
        n = len(row.ids)
        ids[place, :n] = row.ids
        ends[place, :n] = row.ends
        counts[place, :n] = row.counts
        documents[place, :n] = 1
    tokens, targets, numbers = map(torch.from_numpy, (ids, counts, documents))
    learned, messages = torch.tensor(row_bytes), first_few(layout.messages, MOST_NAMED)
    digest, shares = digest_of(ids, ends, counts), tuple(layout.shares())
    blocks = Blocks(tokens, targets, numbers, learned, messages, digest, shares=shares)
    return blocks, torch.from_numpy(ends)
