"""The batches of a Hugging Face Trainer, dictionaries of tensors, and those of this library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ssl_kd.datasets.aligned import AlignedBatch, AlignedBlocks
from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.datasets.picture import Pictures
from ssl_kd.datasets.picture_blocks import PictureBlocks
from ssl_kd.errors import InputError
from ssl_kd.guard.memory import sent

NO_LOSS = -100
"""A label that does not count, as everywhere in transformers."""

_READ = {"input_ids", "attention_mask", "labels", "position_ids", "rows"}
# What processors make of images, of all rows together; and the kind of each token.
_SEEN = {"pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask"}
_KINDS = "mm_token_type_ids"
# What collators of packed rows hand to attention kernels; positions say the same.
_IMPLIED = {"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


class BlockRows(Dataset):
    """The rows of `Blocks` as samples of a Trainer.

    A sample has `input_ids`, `labels`, `position_ids`, `[token]` each without padding, and `rows`,
    its number, by which a cache of a teacher's answers is asked.

    Args:
        blocks: what `make_blocks`, `make_picture_blocks` or `aligned_blocks` gave.

    Attributes:
        hold_more: whether a batch has more than samples hold: images, or another tokenizer's rows.
    """

    def __init__(self, blocks: Blocks | AlignedBlocks) -> None:
        self.blocks = blocks
        self.hold_more = isinstance(blocks, AlignedBlocks | PictureBlocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        own = self.blocks.student if isinstance(self.blocks, AlignedBlocks) else self.blocks
        row = own.batch([index])
        labels = row.input_ids.masked_fill(~row.counts, NO_LOSS)
        return {
            "input_ids": row.input_ids[0],
            "labels": labels[0],
            "position_ids": row.position_ids[0],
            "rows": torch.tensor(index),
        }


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Pad samples of different lengths at the end to one batch.

    Args:
        samples: of `input_ids`, and perhaps `labels`, `attention_mask` and others: numbers, or
            lists or tensors of them `[token]`.

    Returns:
        Each column, `[batch, token]` or `[batch]`; with `attention_mask`.
    """
    fill = {"labels": NO_LOSS}
    columns: dict[str, Tensor] = {}
    for name in samples[0]:
        values = [torch.as_tensor(sample[name]) for sample in samples]
        ragged = values[0].ndim == 1
        columns[name] = (
            pad_sequence(values, batch_first=True, padding_value=fill.get(name, 0))
            if ragged
            else torch.stack(values)
        )
    if "attention_mask" not in columns and "input_ids" in columns:
        ones = [torch.ones(len(sample["input_ids"]), dtype=torch.int64) for sample in samples]
        columns["attention_mask"] = pad_sequence(ones, batch_first=True)
    return columns


def batch_of(inputs: Mapping[str, Any], device: torch.device, images: Sequence[int] = ()) -> Batch:
    """A Trainer's batch as one of this library; waits for the device that it is on.

    Padding may stand on either side. Documents in one row are told apart by `position_ids` that
    restart from 0. What counts are labels other than -100; without `labels`, every real token but a
    document's first. A token that stands for an image never counts.

    Args:
        inputs: `input_ids` `[B, T]`, and perhaps `attention_mask`, `labels`, `position_ids` of the
            same shape, and `rows` `[B]`; `pixel_values` and what else a processor makes of images.
        device: where to.
        images: ids of the tokens that stand for images, see `image_tokens`.

    Raises:
        InputError: something else is among them that the model would get (films); shapes differ; a
            mask has holes; labels are other tokens than `input_ids`, or positions do not count from
            0 in each document.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    seen = {name: sent(given[name], device) for name in _SEEN & given.keys()} if images else {}
    if foreign := sorted(given.keys() - _READ - _IMPLIED - {_KINDS} - seen.keys()):
        raise InputError(
            f"the batch has {', '.join(foreign)}: expected {', '.join(sorted(_READ))}; leave the "
            "others out of what the data_collator returns"
        )
    if "input_ids" not in given:
        raise InputError(f"the batch has {', '.join(given) or 'nothing'}; expected input_ids")
    columns = {name: given[name].cpu() for name in _READ & given.keys()}
    rows = columns.pop("rows", None)
    ids = columns["input_ids"]
    for name, column in columns.items():
        if column.ndim != 2 or column.shape != ids.shape:
            raise InputError(
                f"{name} {tuple(column.shape)} does not fit input_ids {tuple(ids.shape)}: expected "
                "[batch, token] for all"
            )
    mask = columns.pop("attention_mask", torch.ones_like(ids)) > 0
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    if bool((starts.sum(1) > 1).any()):
        raise InputError(
            "attention_mask has zeros between ones: expected padding on one side of a row alone"
        )
    order = mask.int().argsort(dim=1, descending=True, stable=True)  # padding to the end
    width = max(1, int(mask.sum(1).max()))
    order = order[:, :width]
    mask = mask.gather(1, order)
    columns = {name: column.gather(1, order) for name, column in columns.items()}
    batch = _batch(mask, rows, device=device, **columns)
    if not images:
        return batch
    of_images = torch.isin(batch.input_ids, torch.tensor(images, device=batch.input_ids.device))
    if seen and _KINDS in given:
        seen[_KINDS] = of_images.long()
    return replace(
        batch,
        counts=batch.counts & ~of_images.cpu(),
        pictures=Pictures(seen, ("",) * len(mask)) if seen else None,
    )


def inputs_of_model(inputs: Mapping[str, Any], batch: Batch | AlignedBatch) -> dict[str, Any]:
    """What a model itself gets of a Trainer's batch, with the images that the rows stand for."""
    own = {name: value for name, value in inputs.items() if name != "rows"}
    if isinstance(batch, Batch) and batch.pictures is not None:
        own.pop("position_ids", None)  # with images they may be others: the model's business
        own |= batch.pictures.inputs
    return own


def _batch(
    mask: Tensor,
    rows: Tensor | None,
    input_ids: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    device: torch.device,
) -> Batch:
    """The batch, of `[B, T]` columns with padding at the end."""
    column = torch.arange(mask.shape[1]).expand_as(mask)
    begins = torch.zeros_like(mask)
    if position_ids is not None:
        begins = position_ids == 0
    begins[:, 0] = True
    begins &= mask
    positions = column - torch.where(begins, column, 0).cummax(1).values
    if position_ids is not None and bool((position_ids != positions)[mask].any()):
        raise InputError("position_ids do not count from 0 in each document")
    counts = mask & ~begins
    if labels is not None:
        counts &= labels != NO_LOSS
        if bool((labels != input_ids)[counts].any()):
            raise InputError(
                f"labels are other tokens than input_ids: expected the same, or {NO_LOSS} where "
                "there is no loss (they are shifted here)"
            )
    documents = (begins.cumsum(1) * mask).int()
    return Batch(
        input_ids=sent(input_ids.long(), device),
        position_ids=sent(positions, device),
        counts=counts,
        documents=sent(documents, device),
        rows=torch.full((len(mask),), -1) if rows is None else rows.long(),
        characters=0,
        packed=bool((documents > 1).any()),
    )
