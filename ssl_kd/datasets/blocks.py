"""From documents to blocks of tokens: what counts as a target, and who may see whom."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ssl_kd.datasets.packing import best_fit, digest_of
from ssl_kd.datasets.picture import Pictures
from ssl_kd.datasets.records import Example
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
        input_ids: int64 `[B, T]`; padding holds any valid token.
        position_ids: int64 `[B, T]`, from 0 in each document.
        counts: bool `[B, T]` on the CPU, a target that counts; never a document's first token.
        documents: int32 `[B, T]`, the number of the document in its row, from 1; 0 is padding.
        rows: int64 `[B]` on the CPU, which rows these are.
        characters: how many characters of text the targets that count stand for.
        packed: some row holds more than one document.
        written: how many of the rows, the last ones, the student wrote itself: they are no text to
            learn from, but one that a teacher judges.
        pictures: the images of the rows; None where there are none.
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
        """How many targets are of text: the first ones, row by row."""
        return int(self.counts[: len(self.counts) - self.written].sum())

    def model_inputs(self) -> dict[str, Tensor]:
        """What a causal model of transformers gets, with `use_cache=False`.

        There is no attention mask. Padding stands at the end, where nothing that counts can see it.
        Documents are told apart by positions that restart from 0, which transformers looks for
        where it gets neither a mask nor a cache; `isolates_documents` checks that a model does.
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
        counts: bool `[n, T]`, the token is a target that counts. Labels are not shifted here.
        documents: int32 `[n, T]`, the number of the document in its row, from 1; 0 is padding.
        row_characters: int64 `[n]`, characters of text that the row's targets stand for.
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
        """Characters of text that all targets stand for; see `make_blocks`."""
        return int(self.row_characters.sum())

    @property
    def packed(self) -> bool:
        """Whether a row holds more than one document."""
        return any(bool((some > 1).any()) for some in self.documents.split(_BATCH))

    def part(self, rows: slice) -> Blocks:
        """Some rows; the digest stays that of all."""
        columns = ("ids", "counts", "documents", "row_characters")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def batch(
        self, rows: Sequence[int] | Tensor, device: torch.device | str | None = None
    ) -> Batch:
        """Gather rows, without the columns that are padding in all of them.

        Args:
            rows: which, in any order.
            device: where to; None leaves them on the CPU.
        """
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
        before_text: what a text begins with.
        before_prompt: what a prompt begins with; nothing, where the tokenizer itself puts nothing.
        end: what both end with.
    """

    before_text: list[int]
    before_prompt: list[int]
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> Frame:
        """The frame of a tokenizer of transformers.

        Raises:
            ValueError: it has no EOS.
        """
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
        """What stands before an example and after it."""
        if example.messages is not None:  # the template has put there what belongs there
            return [], []
        as_text = example.text is not None or not (example.prompt or self.before_prompt)
        return self.before_text if as_text else self.before_prompt, [self.end]


def framed(
    around: tuple[Sequence[int], Sequence[int]],
    ids: Sequence[int] | np.ndarray,
    counts: np.ndarray,
    characters: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, counts and characters of a document with what stands around it; the end counts."""
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
    """Tokens that see each other: a document, or a part of one that is longer than a block.

    All of them are kept before the rows are laid out: ids are int32, 5 bytes a token in all.
    """

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

    What stands in a document and what of it counts as a target:

    - text: a start token, the text, the end token; all but the start count. The start is the
      tokenizer's BOS, or the end token where it has none, so that the first word is predicted too.
    - prompt and completion: joined as they are and tokenized as one, with the end token after
      them (and BOS before them where the tokenizer puts it there itself). Tokens that reach
      beyond the prompt count, and the end token.
    - messages: what the tokenizer's own chat template makes of them. The assistant's turns count,
      from the generation prompt to what the template ends them with (`ssl_kd.datasets.render`).

    A document longer than a block loses the beginning of its prompt, as far as that goes; what is
    still too long is split. Each further part begins with the last token of the part before, as
    context that does not count: every target counts once, in whatever blocks. Parts
    without a target are dropped.

    `characters` are those of the texts, completions and assistant's messages themselves: not of
    prompts, end tokens or the template. So it is the same number for all tokenizers, and nats
    summed over the targets / characters / ln 2 compares them. (A tokenizer's part in a row is found
    by its offsets.)

    Args:
        dataset: the documents.
        tokenizer: a fast one. Never changed; padding is the end token, which every model knows.
        block_size: tokens in a row, at least 2.
        packing: several documents in a row, each whole, where the longest go first into the
            fullest row that has room (best fit decreasing); else one a row.

    Raises:
        ValueError: a tokenizer that is not fast, lacks an EOS, or lacks the chat template
            that messages need; a block size below 2; a data set that holds images, of which no
            target is left, or of whose turns more than 1 % cannot be located.
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
    kept: list[tuple[Example, Rendered]] = []
    for example in examples:
        rendered = render(example, tokenizer)
        left_out.extend(rendered.left_out)
        turns.update(rendered.turns)
        if rendered.spans:
            kept.append((example, rendered))
    if not kept:
        return
    encoded: Any = tokenizer(
        [rendered.text for _, rendered in kept],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,  # no warning that a document is longer than the model's context
    )
    for (example, rendered), ids, offsets in zip(
        kept, encoded["input_ids"], encoded["offset_mapping"], strict=True
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
    """Which tokens count, and how many characters each stands for; each span's sum is exact."""
    # A token stands for all up to its end: spaces that some tokenizers leave between offsets, too.
    ends = np.array(offsets, dtype=np.int64)[:, 1]
    counts = np.zeros(len(ends), dtype=bool)
    characters = np.zeros(len(ends), dtype=np.int64)
    for begin, stop, n in rendered.spans:
        inside = np.flatnonzero((ends > begin) & (ends <= stop) if begin else ends <= stop)
        if not len(inside):
            continue
        reached = np.clip(ends[inside] - begin, 0, n)
        reached[-1] = n
        counts[inside] = True
        characters[inside] = np.diff(reached, prepend=0)
    return counts, characters


def cut_to_fit(
    document: Document, block_size: int, where: str, left_out: list[str], cut: list[str]
) -> list[_Part]:
    """The pieces of a document; where it had to be cut or has none, that is added to the lists."""
    parts = _fit(document, block_size)
    if not parts:
        left_out.append(f"{where}: none of its tokens carries a loss")
    elif len(document.ids) > block_size:
        cut.append(_describe_cut(document, parts, block_size, where))
    return parts


def _fit(document: Document, block_size: int) -> list[_Part]:
    """Cut a document to pieces of at most `block_size` that hold every target once."""
    length = len(document.ids)
    targets = np.flatnonzero(document.counts)
    if not len(targets):
        return []
    # Of a prompt as much is kept as there is room for, and one token in any case.
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


def in_rows(
    pieces: Sequence[_Part],
    rows: Sequence[Sequence[int]],
    block_size: int,
    padding: int,
    left_out: tuple[str, ...],
) -> Blocks:
    """Lay the pieces of each row out, by number, one after the other, and padding behind them."""
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
    """Ask a model whether documents in one row are hidden from each other.

    Two rows of two documents, of which the first is then changed: the logits of the second must
    stay as they are, up to rounding. They do not in models whose attention ignores positions, or
    that find packed documents only in batches of one (FlashAttention): those need `packing=False`,
    and a warning says why.

    Args:
        model: a causal model of transformers, on any device.

    Returns:
        True where packing is safe. The model and all random states are left as they were.
    """
    if why := _why_not_packed(model):
        logger.warning("one document per row: %s", why)
    return not why


@torch.no_grad()
def _why_not_packed(model: Any) -> str:
    """Why documents need a row each; empty where they may share one."""
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
    except TypeError:  # takes no positions: cannot know of documents
        return leaks
    finally:
        for module, training in modes:
            module.training = training
    moved = (before - after).abs().amax((0, 2))
    # Not to the bit: a mixture of experts sorts tokens in another order, which rounds differently.
    rounding = max(1e-5, 4 * torch.finfo(before.dtype).eps) * before.abs().max()
    if moved[6:].max() <= rounding and moved[:6].min() > 0:
        return ""
    so = "not finite" if moved.any() else "the same whatever it reads"
    return leaks if 0 < moved.max() < torch.inf else f"the output of {type(model).__name__} is {so}"
