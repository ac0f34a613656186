"""Make tiny random models of real language architectures, and a tokenizer for them."""

import torch
import transformers

VOCAB = 64
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 64}
LINEAR = {
    "llama": ("LlamaConfig", SMALL),
    "llama tied": ("LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "qwen2": ("Qwen2Config", SMALL),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 24, **SMALL}),
    "gpt_neox": ("GPTNeoXConfig", SMALL),
    "phi, bias in the head": ("PhiConfig", SMALL),
    "gemma2 without caps": (
        "Gemma2Config",
        {**SMALL, "head_dim": 8, "final_logit_softcapping": None},
    ),
}
NOT_LINEAR = {
    "gemma2": ("Gemma2Config", {**SMALL, "head_dim": 8}),
    "cohere": ("CohereConfig", {**SMALL, "logit_scale": 0.5}),
    "granite": ("GraniteConfig", {**SMALL, "logits_scaling": 2.0}),
}
"""`LINEAR`: architectures whose logits are a linear function of the hidden states."""


def make_model(architecture, seed=0, **changes):
    kind, options = {**LINEAR, **NOT_LINEAR}[architecture]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**{**options, **changes})
    return transformers.AutoModelForCausalLM.from_config(config)


def make_tokenizer(words=26):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i + 3 for i in range(words)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def logits_of(model, ids):
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
