"""Tokenize documents into rows of one length, with targets, positions and packing."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from ssl_kd.core.errors import InputError, first_few
from ssl_kd.core.files.spill import SpilledSequence, filled_array
from ssl_kd.core.memory import to_device_async
from ssl_kd.language.text.dataset import MOST_NAMED, TextDataset
from ssl_kd.language.text.records import Example, Pictures
from ssl_kd.language.text.render import Rendered, check_located, render
from ssl_kd.language.text.segmentation import byte_positions, check_fast
from ssl_kd.language.text.shares import Layout, Share

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_BATCH = 256  # documents tokenized at once
OwnPrompts: TypeAlias = Sequence[tuple[int, Tensor]]
"""For each row, the position of its first target, and the ids that the teacher reads before it."""


@dataclass(frozen=True)
class Batch:
    """A batch of token rows, truncated to the longest row."""

    input_ids: Tensor  # int64 [B, T]; padding is an arbitrary valid token
    position_ids: Tensor  # int64 [B, T], starting at 0 in each document
    counts: Tensor  # bool [B, T] on the CPU, whether each token is a target
    documents: Tensor  # int32 [B, T], counted within the row from 1; 0 for padding
    rows: Tensor  # int64 [B] on the CPU, indices in the data set
    target_bytes: int  # UTF-8 bytes of the text that the targets represent
    packed: bool  # whether a row contains more than one document
    written: int = 0  # last rows that the student generated, not used for cross-entropy
    pictures: Pictures | None = None

    @property
    def text_tokens(self) -> int:
        """Number of targets, not counting rows that the student generated."""
        return int(self.counts[: len(self.counts) - self.written].sum())

    def model_inputs(self) -> dict[str, Tensor]:
        """Return the inputs of a causal language model of transformers, for `use_cache=False`.

        There is no attention mask: padding is at the end, so it does not affect any target. Without
        mask and cache, transformers separates documents where positions restart at 0;
        `isolates_documents` checks this for a model.
        """
        inputs = {"input_ids": self.input_ids}
        if self.pictures is not None:
            inputs |= self.pictures.inputs
        return inputs | {"position_ids": self.position_ids} if self.packed else inputs


@dataclass(frozen=True)
class Blocks:
    """Token rows of one length."""

    ids: Tensor  # int64 [n, T]
    counts: Tensor  # bool [n, T], whether the token at the same position is a target (not shifted)
    documents: Tensor  # int32 [n, T], counted within the row from 1; 0 for padding
    row_bytes: Tensor  # int64 [n], UTF-8 bytes of the text that a row's targets represent
    # messages about the documents that were left out, shortened or split
    left_out: tuple[str, ...]
    digest: str  # SHA-256 of ids, counts and documents
    turns: Counter[str] = field(default_factory=Counter)  # assistant turns, as in `Rendered`
    by_student: Tensor | None = None  # bool [n], rows that the student continued before training
    tags: Tensor | None = None  # int64 [n], index of the tag of a row's documents
    shares: tuple[Share, ...] = ()  # of the documents that were left out, shortened or split
    own_prompts: OwnPrompts = ()  # of each row, with TEACHER_MODEL self

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def target_bytes(self) -> int:
        """Number of UTF-8 bytes of the text that all targets represent."""
        return int(self.row_bytes.sum())

    @property
    def packed(self) -> bool:
        """Whether a row contains more than one document."""
        return any(bool((part > 1).any()) for part in self.documents.split(_BATCH))

    def part(self, rows: slice) -> Self:
        """Return a slice of the rows, with the digest of all rows."""
        columns = ["ids", "counts", "documents", "row_bytes"]
        columns += [n for n in ("by_student", "tags") if getattr(self, n) is not None]
        columns += ["own_prompts"] if self.own_prompts else []
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def first(self, n: int) -> Self:
        """Return the first `n` rows, with a digest of their own."""
        digest = hashlib.sha256(f"{self.digest} {n}".encode()).hexdigest()
        return replace(self.part(slice(n)), digest=digest)

    def batch(
        self, rows: Sequence[int] | Tensor, device: torch.device | str | None = None
    ) -> Batch:
        """Gather rows on a device, without columns of padding; rows of the student come last."""
        rows, written = torch.as_tensor(rows, dtype=torch.int64), 0
        if self.by_student is not None:
            is_written = self.by_student[rows]
            rows, written = torch.cat([rows[~is_written], rows[is_written]]), int(is_written.sum())
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
            target_bytes=int(self.row_bytes[rows].sum()),
            packed=bool((documents > 1).any()),
            written=written,
        )


class Frame(NamedTuple):
    """The special tokens around a document."""

    before_text: list[int]
    before_prompt: list[int]  # empty if the tokenizer itself adds none
    end: int  # after a text or a completion

    @classmethod
    def of(cls, tokenizer: Any) -> Frame:
        """Return the special tokens around a document; InputError if the tokenizer has no EOS."""
        bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        if end is None:
            raise InputError(
                f"the tokenizer {tokenizer.name_or_path!r} has no EOS token to end documents: set "
                "tokenizer.eos_token"
            )
        if bos is None:
            return cls([end], [], end)
        adds = tokenizer("")["input_ids"][:1] == [bos]
        return cls([bos], [bos] if adds else [], end)

    def around(self, example: Example) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after an example."""
        if example.messages is not None:  # the chat template adds them
            return [], []
        as_text = example.text is not None or not (example.prompt or self.before_prompt)
        after = [] if example.is_prompt else [self.end]
        return self.before_text if as_text else self.before_prompt, after


def framed(
    around: tuple[Sequence[int], Sequence[int]],
    ids: Sequence[int] | np.ndarray,
    counts: np.ndarray,
    n_bytes: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add special tokens, `(before, after)`, to ids, counts and byte counts of a document."""
    before, after = around
    lengths = (len(before), len(after))
    counts = np.pad(counts, lengths)
    counts[len(counts) - len(after) :] = True
    counts[0] = False  # no token predicts it
    return np.array([*before, *ids, *after], dtype=np.int64), counts, np.pad(n_bytes, lengths)


@dataclass(frozen=True)
class Document:
    """Token ids of a document, whether each token is a target, and how many bytes it represents."""

    ids: np.ndarray
    counts: np.ndarray
    n_bytes: np.ndarray


class _Part(NamedTuple):
    """A document, or a part of a document that is longer than a row."""

    ids: np.ndarray
    counts: np.ndarray
    target_bytes: int


def make_blocks(
    dataset: TextDataset,
    tokenizer: PreTrainedTokenizerFast,
    block_size: int,
    *,
    packing: bool = True,
) -> Blocks:
    """Tokenize documents into rows of one length, padded with EOS.

    - A text is preceded by BOS (or EOS, if the tokenizer has no BOS) and followed by EOS. All
      tokens except the first one are targets.
    - A prompt and its completion are joined and tokenized as one string, followed by EOS, and
      preceded by BOS if the tokenizer itself adds one. Targets are EOS and all tokens that extend
      beyond the prompt.
    - Messages are formatted by the chat template of the tokenizer. Targets are the assistant turns,
      from the end of the generation prompt to the end of the turn.
    - A prompt alone (messages with the generation prompt) has no target; a model continues it.

    A document longer than a row loses the beginning of its prompt; if it is still too long, it is
    split. Each further part begins with the last token of the previous part, as context that is not
    a target, so every target occurs exactly once. Parts without a target are dropped.

    `target_bytes` counts the UTF-8 bytes of texts, completions and assistant messages, without
    prompts, special tokens and the template. It does not depend on the tokenizer, so bits per byte
    are comparable: (nats summed over the targets) / bytes / ln 2. With `packing`, several complete
    documents of one tag share a row.
    """
    check_fast(tokenizer)
    dataset.check_text_alone()
    frame = Frame.of(tokenizer)
    layout = Layout()
    lengths: list[int] = []
    tags: list[int] = []
    turns: Counter[str] = Counter()

    def cut_up() -> Iterator[_Part]:
        for example, document in tokenized(dataset, tokenizer, frame, layout, turns):
            for piece in cut_to_fit(document, block_size, example, layout):
                lengths.append(len(piece.ids))
                tags.append(dataset.tags.index(example.tag) if dataset.tags else 0)
                yield piece

    pieces = SpilledSequence(cut_up())
    rows = [[i] for i in range(len(pieces))]
    if packing:
        of_tag = [[i for i, tag in enumerate(tags) if tag == each] for each in {*tags}]
        packed = [(places, best_fit([lengths[i] for i in places], block_size)) for places in of_tag]
        rows = sorted([places[i] for i in row] for places, fitted in packed for row in fitted)
    blocks = in_rows(dataset.name, pieces, rows, block_size, frame.end, layout, turns)
    if not dataset.tags:
        return blocks
    row_tags = [tags[row[0]] for row in rows]
    digest = hashlib.sha256(f"{blocks.digest} {dataset.tags} {row_tags}".encode()).hexdigest()
    return replace(blocks, digest=digest, tags=torch.tensor(row_tags))


def tokenized(
    dataset: TextDataset,
    tokenizer: PreTrainedTokenizerFast,
    frame: Frame,
    layout: Layout,
    turns: Counter[str],
) -> Iterator[tuple[Example, Document]]:
    """Yield the documents of a data set; note in `layout` and `turns` what was left out."""
    for start in range(0, len(dataset), _BATCH):
        renderings: list[tuple[Example, Rendered]] = []
        for example in dataset.examples[start : start + _BATCH]:
            rendered = render(example, tokenizer, learn_thoughts=dataset.learn_thoughts)
            turns.update(rendered.turns)
            is_used = bool(rendered.spans or (example.is_prompt and rendered.text))
            layout.leave_out(rendered.left_out, is_used=is_used)
            if is_used:
                renderings.append((example, rendered))
        if not renderings:
            continue
        encoded: Any = tokenizer(
            [rendered.text for _, rendered in renderings],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,  # no warning about documents longer than the context
        )
        for (example, rendered), ids, offsets in zip(
            renderings, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            if not ids:
                layout.left_out.append(f"{example.where}: the tokenizer returns no tokens")
                continue
            targets = count_targets(offsets, rendered)
            yield example, Document(*framed(frame.around(example), ids, *targets))


def count_targets(
    offsets: Sequence[tuple[int, int]], rendered: Rendered
) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens are targets, and how many UTF-8 bytes of text each token represents."""
    # A token represents all bytes up to its end, since some tokenizers skip spaces.
    ends = np.array(offsets, dtype=np.int64)[:, 1]
    positions = byte_positions(rendered.text)
    counts = np.zeros(len(ends), dtype=bool)
    n_bytes = np.zeros(len(ends), dtype=np.int64)
    for begin, stop, n in rendered.spans:
        tokens = np.flatnonzero((ends > begin) & (ends <= stop) if begin else ends <= stop)
        if not len(tokens):
            continue
        reached = np.clip(positions[ends[tokens]] - positions[begin], 0, n)
        reached[-1] = n
        counts[tokens] = True
        n_bytes[tokens] = np.diff(reached, prepend=0)
    return counts, n_bytes


def cut_to_fit(
    document: Document, block_size: int, example: Example, layout: Layout
) -> list[_Part]:
    """Split a document into parts that fit a row, and count in `layout` what was cut."""
    where, length = example.where, len(document.ids)
    if example.is_prompt and length < block_size:
        layout.documents += 1
        return [_Part(document.ids.astype(np.int32), document.counts, 0)]
    if not (parts := _fit(document, block_size)):
        size = f"the prompt has {length} tokens; expected under {block_size}"
        none = "the document has no token to train on"
        layout.left_out.append(f"{where}: {size if example.is_prompt else none}")
        return parts
    layout.documents += 1
    prompt = int(np.flatnonzero(document.counts)[0])
    if example.text is None:
        layout.prompts += 1
    if length > block_size:
        lost = prompt - int(np.flatnonzero(parts[0].counts)[0])
        message = (
            f"{where}: the document has {length} tokens (block_size {block_size}); "
            f"prompt tokens cut off: {lost}; parts: {len(parts)}"
        )
        if lost:
            layout.shortened.append(message)
            layout.tokens += prompt
            layout.lost += lost
        if len(parts) > 1:
            layout.split.append(message)
    return parts


def _fit(document: Document, block_size: int) -> list[_Part]:
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
            target_bytes = int(document.n_bytes[part][counts].sum())
            pieces.append(_Part(document.ids[part].astype(np.int32), counts, target_bytes))
    return pieces


def best_fit(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Pack pieces into rows: the longest first, each into the fullest row with enough space."""
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
    # In the order of the documents, since otherwise the first rows contain the longest ones.
    return sorted(sorted(row) for row in rows)


def digest_of(*columns: np.ndarray) -> str:
    """Return the SHA-256 of arrays that have the same shape."""
    digest = hashlib.sha256(repr(columns[0].shape).encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column).data)  # without a copy
    return digest.hexdigest()


def in_rows(
    name: str,
    pieces: Sequence[_Part],
    rows: Sequence[Sequence[int]],
    block_size: int,
    padding: int,
    layout: Layout,
    turns: Counter[str],
) -> Blocks:
    """Create blocks of the data set `name`; each entry of `rows` lists the pieces of a row.

    InputError is raised if there are no pieces, or too many assistant turns were not located.
    """
    check_located(name, turns, layout.messages)
    if not pieces:
        reasons = "; ".join(first_few(layout.left_out, 3))
        raise InputError(f"{name} contains no token to train on: {reasons}")
    shape = len(rows), block_size
    ids = filled_array(*shape, np.int64, padding)
    counts, documents = filled_array(*shape, np.bool_), filled_array(*shape, np.int32)
    row_bytes = np.zeros(len(rows), np.int64)
    for place, row in enumerate(rows):
        end = 0
        for number, i in enumerate(row, 1):
            piece = pieces[i]
            begin, end = end, end + len(piece.ids)
            ids[place, begin:end] = piece.ids
            counts[place, begin:end] = piece.counts
            documents[place, begin:end] = number
            row_bytes[place] += piece.target_bytes
    digest, messages = digest_of(ids, counts, documents), first_few(layout.messages, MOST_NAMED)
    tokens, targets, numbers, learned = map(torch.from_numpy, (ids, counts, documents, row_bytes))
    layout.turns = turns["there"]
    shares = tuple(layout.shares())
    return Blocks(tokens, targets, numbers, learned, messages, digest, turns, shares=shares)


def isolates_documents(model: Any) -> bool:
    """Check whether a model keeps documents that share a row from attending to each other.

    Rows of two documents are run twice, with another first document; the logits of the second must
    be the same except for rounding. Models fail if their attention ignores positions, or if they
    detect packed documents only in batches of one (FlashAttention). Such a model needs
    `packing=False`, and a warning with the reason is logged.
    """
    if reason := _reason_not_to_pack(model):
        logger.warning("each row contains only one document, since %s", reason)
    return not reason


@torch.no_grad()
def _reason_not_to_pack(model: Any) -> str:
    """Return why each document needs its own row; empty if packing is safe."""
    leaks = f"{type(model).__name__} lets documents in one row attend to each other"
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
    except TypeError:  # the model has no argument position_ids
        return leaks
    finally:
        for module, training in modes:
            module.training = training
    moved = (before - after).abs().amax((0, 2))
    # Not bitwise: a mixture of experts sorts tokens differently, which changes the rounding.
    rounding = max(1e-5, 4 * torch.finfo(before.dtype).eps) * before.abs().max()
    if moved[6:].max() <= rounding and moved[:6].min() > 0:
        return ""
    kind = "not finite" if moved.any() else "the same for any input"
    output = f"the output of {type(model).__name__} is {kind}"
    return leaks if 0 < moved.max() < torch.inf else output
