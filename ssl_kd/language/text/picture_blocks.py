"""Tokenize documents with images into rows of one length."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from typing_extensions import Self

from ssl_kd.core.errors import InputError, brief
from ssl_kd.core.images.decode import UnreadableImage
from ssl_kd.core.memory import to_device_async
from ssl_kd.language.text.blocks import (
    Batch,
    Blocks,
    Document,
    Frame,
    count_targets,
    cut_to_fit,
    framed,
    in_rows,
)
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.records import IMAGE, Example, Picture, Pictures
from ssl_kd.language.text.render import render, show_chat
from ssl_kd.language.text.segmentation import check_fast
from ssl_kd.language.text.shares import Layout

_AROUND_IMAGE = ("<|vision_start|>", "<|vision_end|>")  # in templates of Qwen-VL


@dataclass(frozen=True)
class PictureBlocks(Blocks):
    """Token rows with one document each, and the images of each row, decoded with a batch."""

    processor: Any = None
    pictures: tuple[tuple[Picture, ...], ...] = ()

    def part(self, rows: slice) -> Self:
        """Return a slice of the rows, with the digest of all rows."""
        return replace(super().part(rows), pictures=self.pictures[rows])

    def batch(
        self, rows: Sequence[int] | Tensor, device: torch.device | str | None = None
    ) -> Batch:
        """Gather rows and their images; raise UnreadableImage if an image cannot be read."""
        batch = super().batch(rows, device)
        pictures = {row: self.pictures[row] for row in batch.rows.tolist()}
        if not any(pictures.values()):
            return batch
        of = tuple(" ".join(p.digest for p in self.pictures[row]) for row in batch.rows.tolist())
        images = [
            picture.image(f"an image of row {row}")
            for row in batch.rows.tolist()
            for picture in self.pictures[row]
        ]
        inputs = _prepared(self.processor, images)
        if "mm_token_type_ids" in self.processor.model_input_names:
            ids = torch.tensor(image_tokens(self.processor), device=batch.input_ids.device)
            inputs["mm_token_type_ids"] = torch.isin(batch.input_ids, ids).long()
        inputs = {name: to_device_async(value, device) for name, value in inputs.items()}
        return replace(batch, pictures=Pictures(inputs, of))


def image_tokens(of: Any) -> list[int]:
    """Return the IDs that stand for images and videos in a processor or a model's configuration."""
    names = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
    ids = {getattr(of, name, None) for name in names}
    return sorted(number for number in ids if isinstance(number, int) and number >= 0)


def processor_state(processor: Any) -> dict[str, Any]:
    """Return the settings of a processor of transformers that affect how it preprocesses images."""
    state = processor.image_processor.to_dict()
    settings = {k: v for k, v in state.items() if "processor" not in k and k != "_processor_class"}
    return {**settings, "image_tokens": image_tokens(processor)}


def make_picture_blocks(dataset: TextDataset, processor: Any, block_size: int) -> PictureBlocks:
    """Tokenize documents with and without images into rows, with the same targets as `make_blocks`.

    The processor expands each image to several tokens, which are never targets. A document with
    images that is longer than a row is left out, so that no image is cut.
    """
    check_fast(processor.tokenizer)
    reader = _Reader(processor, dataset.learn_thoughts)
    layout = reader.layout
    pieces, pictures = [], []
    for example in dataset.examples:
        document = reader.read(example)
        if not isinstance(document, Document):
            layout.left_out += [document] if document else []
            continue
        if example.images and len(document.ids) > block_size:
            n = int(np.isin(document.ids, reader.images).sum())
            layout.left_out.append(
                f"{example.where}: the document has {len(document.ids)} tokens, {n} of them for "
                f"{len(example.images)} images; expected at most {block_size}: raise --block_size"
            )
            continue
        parts = cut_to_fit(document, block_size, example, layout)
        pieces += parts
        pictures += [example.images] * len(parts)
    rows = [[i] for i in range(len(pieces))]
    end, turns = reader.frame.end, reader.turns
    blocks = in_rows(dataset.name, pieces, rows, block_size, end, layout, turns)
    digests = [[picture.digest for picture in images] for images in pictures]
    identity = json.dumps(
        [blocks.digest, digests, processor_state(processor)], default=str, sort_keys=True
    )
    fields = {**vars(blocks), "digest": hashlib.sha256(identity.encode()).hexdigest()}
    return PictureBlocks(**fields, processor=processor, pictures=tuple(pictures))


class _Reader:
    """Tokenizes documents with a processor."""

    def __init__(self, processor: Any, learn_thoughts: bool) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.options: Any = {"learn_thoughts": learn_thoughts}
        self.images = image_tokens(processor)
        self.turns: Counter[str] = Counter()
        self.layout = Layout()
        self.frame = Frame.of(self.tokenizer)
        self.template = getattr(processor, "chat_template", None) or self.tokenizer.chat_template
        self._tried = False
        known = self.tokenizer.get_vocab()
        token = str(getattr(processor, "image_token", IMAGE))
        around = _AROUND_IMAGE if all(mark in known for mark in _AROUND_IMAGE) else ("", "")
        self._place = token.join(around)

    def read(self, example: Example) -> Document | str | None:
        """Return a document's tokens, or why it is left out; None if `layout` already says why."""
        rendered = render(self._adapted(example), self.tokenizer, self.template, **self.options)
        self.turns.update(rendered.turns)
        is_used = bool(rendered.spans or (example.is_prompt and rendered.text))
        self.layout.leave_out(rendered.left_out, is_used=is_used)
        if not is_used:
            return None
        encoded: Any = self.tokenizer(
            rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(encoded["input_ids"], dtype=np.int64)
        if not len(ids):
            return f"{example.where}: the tokenizer returns no tokens"
        counts, n_bytes = count_targets(encoded["offset_mapping"], rendered)
        places = int(np.isin(ids, self.images).sum())
        if places != len(example.images):
            return f"{example.where}: {len(example.images)} images, but {places} image tokens"
        if example.images:
            try:
                images = [
                    picture.image(f"{example.where}: image {n}")
                    for n, picture in enumerate(example.images, 1)
                ]
            except UnreadableImage as error:
                return str(error)
            expanded = self._expanded(example, rendered.text, images)
            text, of_text = ~np.isin(expanded, self.images), ~np.isin(ids, self.images)
            if not np.array_equal(expanded[text], ids[of_text]):
                raise self._unfit("inserts tokens around an image that are not image tokens")
            arrays = np.zeros(len(expanded), dtype=bool), np.zeros(len(expanded), dtype=np.int64)
            arrays[0][text], arrays[1][text] = counts[of_text], n_bytes[of_text]
            ids, (counts, n_bytes) = expanded, arrays
        return Document(*framed(self.frame.around(example), ids, counts, n_bytes))

    def _adapted(self, example: Example) -> Example:
        """Convert an example to the form that the tokenizer and the template expect."""
        if example.messages is not None:
            if not self._takes_parts:
                return example
            turns = tuple(
                {**turn, "content": [{"type": "text", "text": turn["content"]}]}
                if isinstance(turn["content"], str)
                else turn
                for turn in example.messages
            )
            return replace(example, messages=turns)
        if not example.images:
            return example
        strings = {"text": example.text, "prompt": example.prompt}
        placed = {k: v and v.replace(IMAGE, self._place) for k, v in strings.items()}
        return replace(example, **placed)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the chat template needs message contents as lists of parts."""
        messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        try:
            text, _ = show_chat(messages, None, self.tokenizer, self.template)
        except TemplateError:
            return False
        return "x" in text and "'type'" not in text

    def _expanded(self, example: Example, text: str, images: list[Any]) -> np.ndarray:
        """Return the token ids with each image expanded by the processor."""
        try:
            inputs: Any = self.processor(
                images=images, text=[text], add_special_tokens=False, return_tensors="pt"
            )
        except ValueError as error:
            raise InputError(f"{example.where}: the processor fails: {brief(error)}") from error
        ids = inputs["input_ids"][0]
        if not self._tried:
            self._try(inputs, images)
            self._tried = True
        return ids.numpy()

    def _try(self, inputs: Any, images: list[Any]) -> None:
        """Raise InputError unless the processor preprocesses images independently of the text."""
        of_text = ("input_ids", "attention_mask", "mm_token_type_ids")
        with_text = {name: value for name, value in inputs.items() if name not in of_text}
        without_text = _prepared(self.processor, images)
        same = with_text.keys() == without_text.keys() and all(
            torch.equal(torch.as_tensor(with_text[name]), value)
            for name, value in without_text.items()
        )
        if not same:
            raise self._unfit("preprocesses images differently with and without text")
        kinds, ids = inputs.get("mm_token_type_ids"), inputs["input_ids"]
        if kinds is not None and not torch.equal(
            torch.as_tensor(kinds) > 0, torch.isin(ids, torch.tensor(self.images))
        ):
            raise self._unfit("marks as images some tokens that are not image tokens")

    def _unfit(self, why: str) -> InputError:
        name = type(self.processor).__name__
        return InputError(
            f"{name} {why}, which is not supported: use a model that represents an image by one "
            "repeated token, such as Llava, Qwen2-VL, Qwen2.5-VL or Qwen3-VL"
        )


def _prepared(processor: Any, images: list[Any]) -> dict[str, Tensor]:
    return dict(processor.image_processor(images=images, return_tensors="pt"))
