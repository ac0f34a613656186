"""Write a tiny Llama and a byte-level tokenizer to a GGUF file, as llama.cpp's converter does."""

import json

import transformers
from einops import rearrange

from tests.language.models.small_models import make_model

TEXT = [
    "The cat sat on the mat, and the dog sat on the log.",
    "The capital of France is Paris, and the capital of Spain is Madrid.",
]
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )


def make_llama(tokenizer, **changes):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    options = {"vocab_size": len(tokenizer), **sizes, **ids, **changes}
    return make_model("llama tied", **options).eval()


def write_gguf(path, model, tokenizer, *, kind="F32"):
    """Write the model with its linear layers in a type of GGUF, such as `F32` or `Q8_0`."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer)
    quantized = getattr(gguf.GGMLQuantizationType, kind)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # shared with the embeddings
        weight = _as_in_llama_cpp(name, weight, config)
        values = weight.numpy()
        if weight.ndim == 2 and kind != "F32":
            packed = gguf.quants.quantize(values, quantized)
            writer.add_tensor(_name_of(name), packed, raw_dtype=quantized)
        else:
            writer.add_tensor(_name_of(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer, tokenizer):
    import gguf

    special = set(tokenizer.all_special_ids) | {0}
    kinds = [gguf.TokenType.NORMAL, gguf.TokenType.CONTROL]
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    writer.add_token_types([kinds[token in special] for token in range(len(tokenizer))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)


def _name_of(name):
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def _as_in_llama_cpp(name, weight, config):
    """Return a weight in the order of llama.cpp, which interleaves the two halves of a rotation."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if part not in heads:
        return weight
    pattern = "(head half half_dim) width -> (head half_dim half) width"
    return rearrange(weight, pattern, head=heads[part], half=2).contiguous()
