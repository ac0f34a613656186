"""Train a tokenizer on a text data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ssl_kd.language.text.dataset import TextDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def train_tokenizer(dataset: TextDataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer deterministically; it adds `<s>` before a text.

    References:
        Sennrich, Haddow, Birch (2016), Neural machine translation of rare words with subword units.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<pad>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(dataset), trainer)
    bpe.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def _texts(dataset: TextDataset) -> Iterator[str]:
    for example in dataset.examples:
        if example.messages is not None:
            yield from (message["content"] for message in example.messages)
        elif example.text is not None:
            yield example.text
        else:
            yield (example.prompt or "") + (example.completion or "")
