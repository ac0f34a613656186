"""Blocks of tokens from documents: targets, positions, packing."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ssl_kd.datasets.records import Example, Pictures
from ssl_kd.datasets.render import Rendered, check_located, render
from ssl_kd.datasets.segmentation import check_fast
from ssl_kd.datasets.spill import SpilledSequence, filled_array
from ssl_kd.datasets.text import TextDataset, first_few
from ssl_kd.errors import InputError
from ssl_kd.guard.memory import to_device_async

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_BATCH = 256  # documents handed to the tokenizer at once


@dataclass(frozen=True)
class Batch:
    """Some rows of a `Blocks`, cut to the longest of them.

    Attributes:
        input_ids: int64 `[B, T]`; padding is any valid token.
        position_ids: int64 `[B, T]`, from 0 in each document.
        counts: bool `[B, T]` on the CPU, targets that count; never a document's first token.
        documents: int32 `[B, T]`, the number of the document in its row, from 1; 0 is padding.
        rows: int64 `[B]` on the CPU, row numbers.
        characters: number of characters that the counted targets represent.
        packed: whether a row contains more than one document.
        written: number of rows, at the end, that the student generated: used for distillation, not
            for cross-entropy.
        pictures: the images of the rows, or None.
    """

    input_ids: Tensor
    position_ids: Tensor
    counts: Tensor
    documents: Tensor
    rows: Tensor
    characters: int
    packed: bool
    written: int = 0
    pictures: Pictures | None = None

    @property
    def text_tokens(self) -> int:
        """Number of targets in rows of the data, which precede generated rows."""
        return int(self.counts[: len(self.counts) - self.written].sum())

    def model_inputs(self) -> dict[str, Tensor]:
        """Return the inputs of a causal model of transformers, for `use_cache=False`.

        There is no attention mask: padding is at the end, invisible to anything that counts.
        transformers separates documents by positions that restart from 0 if it gets neither a mask
        nor a cache; `isolates_documents` checks that a model does so.
        """
        inputs = {"input_ids": self.input_ids}
        if self.pictures is not None:
            inputs |= self.pictures.inputs
        return inputs | {"position_ids": self.position_ids} if self.packed else inputs


@dataclass(frozen=True)
class Blocks:
    """Tokens in rows of one length.

    Attributes:
        ids: int64 `[n, T]`.
        counts: bool `[n, T]`, whether the token is a target that counts. Labels are not shifted.
        documents: int32 `[n, T]`, the number of the document in its row, from 1; 0 is padding.
        row_characters: int64 `[n]`, characters that the row's targets represent.
        left_out: documents that were left out, shortened or split, the first few.
        digest: SHA-256 of ids, counts and documents.
        turns: of the assistant, see `Rendered`.
    """

    ids: Tensor
    counts: Tensor
    documents: Tensor
    row_characters: Tensor
    left_out: tuple[str, ...]
    digest: str
    turns: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def characters(self) -> int:
        """Number of characters that all targets represent; see `make_blocks`."""
        return int(self.row_characters.sum())

    @property
    def packed(self) -> bool:
        """Whether a row contains more than one document."""
        return any(bool((part > 1).any()) for part in self.documents.split(_BATCH))

    def part(self, rows: slice) -> Blocks:
        """Return some rows; the digest stays that of all."""
        columns = ("ids", "counts", "documents", "row_characters")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def batch(
        self, rows: Sequence[int] | Tensor, device: torch.device | str | None = None
    ) -> Batch:
        """Gather rows on a device, without columns that are padding in all of them."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        documents = self.documents[rows]
        width = int((documents > 0).any(0).sum())
        documents = documents[:, :width]
        column = torch.arange(width).expand(len(rows), -1)
        begins = torch.zeros_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        first = torch.where(begins, column, 0).cummax(1).values
        return Batch(
            input_ids=to_device_async(self.ids[rows, :width], device),
            position_ids=to_device_async(column - first, device),
            counts=self.counts[rows, :width],
            documents=to_device_async(documents, device),
            rows=rows,
            characters=int(self.row_characters[rows].sum()),
            packed=bool((documents > 1).any()),
        )


class Frame(NamedTuple):
    """The special tokens around a document; see `make_blocks`.

    Attributes:
        before_text: tokens before a text.
        before_prompt: tokens before a prompt; none if the tokenizer itself adds none.
        end: the token after both.
    """

    before_text: list[int]
    before_prompt: list[int]
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> Frame:
        """Return the frame of a tokenizer; raise InputError if it has no EOS."""
        bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        if end is None:
            raise InputError(
                f"the tokenizer {tokenizer.name_or_path!r} has no end-of-document token: "
                "set tokenizer.eos_token"
            )
        if bos is None:
            return cls([end], [], end)
        adds = tokenizer("")["input_ids"][:1] == [bos]
        return cls([bos], [bos] if adds else [], end)

    def around(self, example: Example) -> tuple[list[int], list[int]]:
        """Return the tokens before an example and after it."""
        if example.messages is not None:  # the template adds its own
            return [], []
        as_text = example.text is not None or not (example.prompt or self.before_prompt)
        return self.before_text if as_text else self.before_prompt, [self.end]


def framed(
    around: tuple[Sequence[int], Sequence[int]],
    ids: Sequence[int] | np.ndarray,
    counts: np.ndarray,
    characters: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add the tokens around a document to ids, counts and characters; the end counts."""
    before, after = around
    lengths = (len(before), len(after))
    counts = np.pad(counts, lengths)
    counts[len(counts) - len(after) :] = True
    counts[0] = False  # nothing predicts it
    return np.array([*before, *ids, *after], dtype=np.int64), counts, np.pad(characters, lengths)


@dataclass(frozen=True)
class Document:
    """The tokens of a document."""

    ids: np.ndarray
    counts: np.ndarray
    characters: np.ndarray


class _Part(NamedTuple):
    """A document, or a part of one that is longer than a block; 5 bytes per token."""

    ids: np.ndarray
    counts: np.ndarray
    characters: int


def make_blocks(
    dataset: TextDataset,
    tokenizer: PreTrainedTokenizerFast,
    block_size: int,
    *,
    packing: bool = True,
) -> Blocks:
    """Turn documents into blocks of tokens.

    Tokens of a document, and which of them count as targets:

    - text: a start token, the text, the end token; all but the start count. The start is the
      tokenizer's BOS, or the end token if it has none, so that the first word is predicted too.
    - prompt and completion: joined and tokenized as one string, followed by the end token (and
      preceded by BOS if the tokenizer itself adds it). Tokens that reach beyond the prompt count,
      and the end token.
    - messages: formatted by the tokenizer's chat template. The assistant's turns count, from the
      generation prompt to the template's end of the turn (`ssl_kd.datasets.render`).

    A document longer than a block loses the beginning of its prompt; if it is still too long, it is
    split. Each further part begins with the last token of the previous part, as context that does
    not count: every target counts exactly once. Parts without a target are dropped.

    `characters` are those of texts, completions and assistant messages, without prompts, end tokens
    and the template. The number does not depend on the tokenizer, so (nats summed over the targets)
    / characters / ln 2 is comparable. (The share of each row is found by token offsets.)

    Args:
        dataset: the documents.
        tokenizer: a fast one; not modified. Padding is the end token, which every model knows.
        block_size: tokens in a row, at least 2.
        packing: put several complete documents in a row, the longest first into the fullest row
            that has room (best fit decreasing); otherwise one per row.

    Raises:
        ValueError: a tokenizer that is not fast, has no EOS, or has no chat template for messages;
            a block size below 2; a data set with images, or without any target, or with more than
            1 % of its turns not located.
    """
    if block_size < 2:
        raise ValueError(
            f"block_size must be at least 2 (a token and its target), got {block_size}"
        )
    check_fast(tokenizer)
    dataset.check_text_alone()
    frame = Frame.of(tokenizer)
    left_out: list[str] = []
    cut: list[str] = []
    lengths: list[int] = []
    turns: Counter[str] = Counter()

    def cut_up() -> Iterator[_Part]:
        for start in range(0, len(dataset), _BATCH):
            batch = dataset.examples[start : start + _BATCH]
            for example, document in _tokenize(batch, tokenizer, frame, left_out, turns):
                for piece in cut_to_fit(document, block_size, example.where, left_out, cut):
                    lengths.append(len(piece.ids))
                    yield piece

    pieces = SpilledSequence(cut_up())
    check_located(dataset.name, turns, left_out)
    if not pieces:
        raise InputError(f"{dataset.name}: no target is left: {'; '.join(first_few(left_out, 3))}")
    rows = best_fit(lengths, block_size) if packing else [[i] for i in range(len(pieces))]
    notes = (*first_few(left_out), *first_few(cut, 5))
    return replace(in_rows(pieces, rows, block_size, frame.end, notes), turns=turns)


def _tokenize(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    frame: Frame,
    left_out: list[str],
    turns: Counter[str],
) -> Iterator[tuple[Example, Document]]:
    renderings: list[tuple[Example, Rendered]] = []
    for example in examples:
        rendered = render(example, tokenizer)
        left_out.extend(rendered.left_out)
        turns.update(rendered.turns)
        if rendered.spans:
            renderings.append((example, rendered))
    if not renderings:
        return
    encoded: Any = tokenizer(
        [rendered.text for _, rendered in renderings],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,  # no warning that a document is longer than the model's context
    )
    for (example, rendered), ids, offsets in zip(
        renderings, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        if not ids:
            left_out.append(f"{example.where}: the tokenizer gives no token for it")
            continue
        yield (
            example,
            Document(*framed(frame.around(example), ids, *count_targets(offsets, rendered))),
        )


def count_targets(
    offsets: Sequence[tuple[int, int]], rendered: Rendered
) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens count, and how many characters each represents; span sums are exact."""
    # A token represents all up to its end, as some tokenizers leave spaces between offsets.
    ends = np.array(offsets, dtype=np.int64)[:, 1]
    counts = np.zeros(len(ends), dtype=bool)
    characters = np.zeros(len(ends), dtype=np.int64)
    for begin, stop, n in rendered.spans:
        tokens = np.flatnonzero((ends > begin) & (ends <= stop) if begin else ends <= stop)
        if not len(tokens):
            continue
        reached = np.clip(ends[tokens] - begin, 0, n)
        reached[-1] = n
        counts[tokens] = True
        characters[tokens] = np.diff(reached, prepend=0)
    return counts, characters


def cut_to_fit(
    document: Document, block_size: int, where: str, left_out: list[str], cut: list[str]
) -> list[_Part]:
    """Return the pieces of a document; if it is cut or has none, add a line to the lists."""
    parts = _fit(document, block_size)
    if not parts:
        left_out.append(f"{where}: none of its tokens carries a loss")
    elif len(document.ids) > block_size:
        cut.append(_describe_cut(document, parts, block_size, where))
    return parts


def _fit(document: Document, block_size: int) -> list[_Part]:
    """Cut a document into pieces of at most `block_size` with every target once."""
    length = len(document.ids)
    targets = np.flatnonzero(document.counts)
    if not len(targets):
        return []
    # Keep as much of a prompt as fits, and at least one token.
    begin = min(max(length - block_size, 0), int(targets[0]) - 1)
    pieces = []
    for start in range(begin, length - 1, block_size - 1):
        part = slice(start, start + block_size)
        counts = document.counts[part].copy()
        counts[0] = False
        if counts.any():
            characters = int(document.characters[part][counts].sum())
            pieces.append(_Part(document.ids[part].astype(np.int32), counts, characters))
    return pieces


def _describe_cut(document: Document, parts: Sequence[_Part], block_size: int, where: str) -> str:
    first = int(np.flatnonzero(document.counts)[0]) - int(np.flatnonzero(parts[0].counts)[0])
    lost = f"the first {first} tokens of the prompt cut off" if first else ""
    split = f"split into {len(parts)} parts" if len(parts) > 1 else ""
    what = " and ".join(filter(None, (lost, split)))
    return f"{where}: {len(document.ids)} tokens for blocks of {block_size}, {what}"


def best_fit(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Assign pieces to rows, the longest first, each to the fullest row with room for it.

    Returns:
        The numbers of the pieces in each row.
    """
    open_rows: dict[int, list[list[int]]] = {}
    rooms: list[int] = []  # the keys of open_rows, sorted
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[i])
        if at == len(rooms):
            room, row = block_size, []
            rows.append(row)
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        row.append(i)
        room -= lengths[i]
        if room not in open_rows:
            open_rows[room] = []
            insort(rooms, room)
        open_rows[room].append(row)
    # In the order of the documents, so that the first rows are not those of the longest ones.
    return sorted(sorted(row) for row in rows)


def digest_of(*columns: np.ndarray) -> str:
    """Return the SHA-256 of columns of one shape."""
    digest = hashlib.sha256(repr(columns[0].shape).encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column).data)  # no copy of it
    return digest.hexdigest()


def in_rows(
    pieces: Sequence[_Part],
    rows: Sequence[Sequence[int]],
    block_size: int,
    padding: int,
    left_out: tuple[str, ...],
) -> Blocks:
    """Lay out the pieces of each row, given by number, with padding after them."""
    shape = len(rows), block_size
    ids = filled_array(*shape, np.int64, padding)
    counts, documents = filled_array(*shape, np.bool_), filled_array(*shape, np.int32)
    characters = np.zeros(len(rows), np.int64)
    for place, row in enumerate(rows):
        end = 0
        for number, i in enumerate(row, 1):
            piece = pieces[i]
            begin, end = end, end + len(piece.ids)
            ids[place, begin:end] = piece.ids
            counts[place, begin:end] = piece.counts
            documents[place, begin:end] = number
            characters[place] += piece.characters
    return Blocks(
        torch.from_numpy(ids),
        torch.from_numpy(counts),
        torch.from_numpy(documents),
        torch.from_numpy(characters),
        left_out,
        digest_of(ids, counts, documents),
    )


def isolates_documents(model: Any) -> bool:
    """Return whether a model hides documents in one row from each other.

    In two rows of two documents the first is changed: the logits of the second must stay the same
    up to rounding. They do not in models whose attention ignores positions, or that detect packed
    documents only in batches of one (FlashAttention): those need `packing=False`, and a warning
    says why.

    Args:
        model: a causal model of transformers, on any device. The model and all random states are
            left unchanged.
    """
    if reason := _reason_not_to_pack(model):
        logger.warning("one document per row: %s", reason)
    return not reason


@torch.no_grad()
def _reason_not_to_pack(model: Any) -> str:
    """Return why each document needs its own row; empty if packing is safe."""
    leaks = f"{type(model).__name__} would let packed documents attend to each other"
    modes: list[tuple[nn.Module, bool]] = [(m, m.training) for m in model.modules()]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = torch.cat([(ids[:, :6] + 1) % vocabulary, ids[:, 6:]], dim=1)
    positions = (torch.arange(12) % 6).expand(2, -1).to(device := next(model.parameters()).device)
    try:
        model.eval()
        before, after = (
            model(input_ids=i.to(device), position_ids=positions, use_cache=False).logits
            for i in (ids, changed)
        )
    except TypeError:  # takes no positions
        return leaks
    finally:
        for module, training in modes:
            module.training = training
    moved = (before - after).abs().amax((0, 2))
    # Not bitwise: a mixture of experts sorts tokens in another order, which rounds differently.
    rounding = max(1e-5, 4 * torch.finfo(before.dtype).eps) * before.abs().max()
    if moved[6:].max() <= rounding and moved[:6].min() > 0:
        return ""
    kind = "not finite" if moved.any() else "the same for any input"
    output = f"the output of {type(model).__name__} is {kind}"
    return leaks if 0 < moved.max() < torch.inf else output
