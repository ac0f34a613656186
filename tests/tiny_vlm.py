"""Tiny image-text models of real architectures with random weights, and data for them."""

import json

import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from ssl_kd.language.text.new_tokenizer import train_tokenizer
from tests.tiny import Tiny, sentence

LLAVA_CHAT = (
    "{% for message in messages %}{{ message['role'].upper() }}:\n"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>"
    "{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% endfor %}{{ '</s>' if message['role'] == 'assistant' else ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)
QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("llava", "qwen2_vl", "qwen2_5_vl")
COLOURS = ("red", "lime", "blue", "white", "black", "yellow")


def tokenizer_of(kind):
    made = train_tokenizer(Tiny.texts(), 300)
    more = ["<image>"] if kind == "llava" else ["<|im_start|>", "<|im_end|>", "<|vision_start|>"]
    more += [] if kind == "llava" else ["<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    made.add_special_tokens({"additional_special_tokens": more})
    assert isinstance(made, PreTrainedTokenizerFast)
    return made


def processor_of(kind):
    """Build the processor of one of `KINDS` from its parts."""
    import transformers as hf

    tokenizer = tokenizer_of(kind)
    if kind == "llava":
        size = {"height": 28, "width": 28}
        images = hf.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size)
        return hf.LlavaProcessor(
            images,
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=LLAVA_CHAT,
        )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # adds no BOS token
        single="$A", pair="$A $B", special_tokens=[]
    )
    limits = {"shortest_edge": 28 * 28, "longest_edge": 56 * 84}
    pixels = {"patch_size": 14, "merge_size": 2, "size": limits}
    films = hf.Qwen2VLVideoProcessor(**pixels)
    kind_of = hf.Qwen2VLProcessor if kind == "qwen2_vl" else hf.Qwen2_5_VLProcessor
    return kind_of(hf.Qwen2VLImageProcessor(**pixels), tokenizer, films, chat_template=QWEN_CHAT)


def model_of(kind, processor, seed=0, spread=0.2, layers=3):
    """Build a model with weights of standard deviation `spread`, and `layers` language layers."""
    import transformers as hf

    ids = processor.tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(processor.tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    torch.manual_seed(seed)
    if kind == "llava":
        tower = hf.CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,  # as in the language model: the two must not be confused
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        )
        config = hf.LlavaConfig(
            vision_config=tower,
            text_config=hf.LlamaConfig(**text),
            image_token_index=ids("<image>"),
        )
    else:
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2]}
        marks = {
            "image_token_id": ids("<|image_pad|>"),
            "video_token_id": ids("<|video_pad|>"),
            "vision_start_token_id": ids("<|vision_start|>"),
            "vision_end_token_id": ids("<|vision_end|>"),
        }
        sizes = {"depth": layers, "num_heads": 2, "patch_size": 14}
        if kind == "qwen2_vl":
            seen = {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, **sizes}
            config = hf.Qwen2VLConfig(text_config=text, vision_config=seen, **marks)
        else:
            seen = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, **sizes}
            seen |= {"window_size": 56, "fullatt_block_indexes": [1]}
            config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=seen, **marks)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, 0, spread)
    return model


def folder_of(path, kind, seed=0, **changes):
    """Save a model with its processor, and return the folder."""
    processor = processor_of(kind)
    model_of(kind, processor, seed, **changes).save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


def draw(path, i):
    """Save an image of one color with a corner of another; its size depends on `i`."""
    size = ((28, 28), (60, 30), (40, 90))[i % 3]
    image = Image.new("RGB", size, COLOURS[i % 6])
    image.paste(COLOURS[(i + 1 + i // 6) % 6], (0, 0, size[0] // 2, size[1] // 2))
    image.save(path)
    return image


def records(folder, n=24, start=0, images=lambda i: i % 3):
    """Return chat records with `images(i)` images each."""
    made = []
    for i in range(start, start + n):
        parts = []
        for k in range(images(i)):
            draw(folder / f"{i}-{k}.png", i + k)
            parts.append({"type": "image", "path": f"{i}-{k}.png"})
        asked = [*parts, {"type": "text", "text": f"What is {i}?"}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": sentence(i)}]}
        made.append({"messages": [{"role": "user", "content": asked}, answer]})
    return made


def write_records(path, made):
    path.write_text("".join(json.dumps(record) + "\n" for record in made))
    return str(path)
