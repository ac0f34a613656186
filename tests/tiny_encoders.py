"""Tiny random encoders of texts and sounds, saved as a repository of the Hub has them."""

import json

import numpy as np
import pytest
import torch

WORDS = "cat dog bird fox tree sea sun moon runs sleeps sings eats red blue green small big the a"
LENGTHS = (3, 40, 1, 17, 9, 28, 2, 12, 33, 5, 21)


def sentence(n, seed=0):
    words = WORDS.split()
    return " ".join(words[i] for i in np.random.default_rng(seed).integers(0, len(words), n))


def save_random(folder, model_class, config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder)


def text_encoder(folder, *, pooling="mean_tokens", normalized=True, prompt=None, most=32):
    """Save a BERT of two layers with a WordPiece vocabulary and a description of its pooling."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir(parents=True, exist_ok=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS.split(), "##s", "query", ":"]))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=64)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"intermediate_size": 32, "max_position_embeddings": 64}
    config = transformers.BertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **size)
    save_random(folder, transformers.BertModel, config)
    tokenizer.save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalized else [])]
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    modes = ["cls_token", "mean_tokens", "max_tokens", "lasttoken"]
    chosen = {f"pooling_mode_{mode}": mode in pooling.split() for mode in modes}
    files = {"modules": modules, "1_Pooling/config": chosen}
    files["sentence_bert_config"] = {"max_seq_length": most}
    if prompt is not None:
        prompts = {"default_prompt_name": "mine", "prompts": {"mine": prompt}}
        files["config_sentence_transformers"] = prompts
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def audio_encoder(folder):
    """Save a wav2vec 2.0 of one layer with its feature extractor."""
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"intermediate_size": 32, "conv_dim": (8, 8), "conv_kernel": (10, 8)}
    size |= {"conv_stride": (5, 4), "num_conv_pos_embeddings": 4, "mask_time_prob": 0.0}
    size |= {"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}
    save_random(folder, transformers.Wav2Vec2Model, transformers.Wav2Vec2Config(**size))
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


def whisper(folder):
    """Save a Whisper of one layer with its feature extractor."""
    transformers = pytest.importorskip("transformers")
    size = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 80}
    size |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    size |= {f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")}
    size |= {"vocab_size": 60, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
    size |= {"decoder_start_token_id": 1, "max_target_positions": 8}
    save_random(folder, transformers.WhisperModel, transformers.WhisperConfig(**size))
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    return folder


def tone(hertz, seconds, rate=16_000, seed=0):
    """Return a tone with a little noise, float32 `[n]`."""
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.01, len(times))
    return (0.3 * np.sin(2 * np.pi * hertz * times) + noise).astype(np.float32)
