"""Load a student, cut it from a teacher or build it anew; add adapters to it, and save it."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ssl_kd.core.errors import InputError, UserError, brief
from ssl_kd.core.files import sync_folder
from ssl_kd.core.memory import is_out_of_memory
from ssl_kd.core.quiet import quiet_transformers
from ssl_kd.core.seeds import seeded
from ssl_kd.language.models.card import model_card
from ssl_kd.language.models.causal import (
    CausalLM,
    auto_model,
    llm_module,
    load_causal_lm,
    n_ids,
    outline_causal_lm,
    sees,
    tokenizer_id,
    without_adapters,
)
from ssl_kd.language.models.copied_layers import copied_layers
from ssl_kd.language.models.dtypes import cast_weights
from ssl_kd.language.models.finite import not_finite

logger = logging.getLogger(__name__)

# Names in configurations of different families for sizes that scale with the width.
_WIDTHS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "word_embed_proj_dim",
)
_HEAD_DIM = 64  # of a new Llama, if the width allows it
_TOWERS = {"vision_tower", "visual", "vision_model", "vision_encoder", "image_tower"}
ALL_LINEAR = "all-linear"  # all linear layers but the output head
_PROJECTOR = "merger"  # of Qwen-VL, which keeps it inside the tower


class NotFinite(UserError, ValueError):
    """Raised instead of saving a model that has a NaN or an infinity in its weights."""


def build_student(
    spec: str,
    teacher: CausalLM | None,
    tokenizer: Any = None,
    *,
    seed: int,
    dtype: torch.dtype | None = torch.float32,
    remote_code: bool = False,
    quantization: Mapping[str, Any] | None = None,
) -> CausalLM:
    """Build or load a student, in evaluation mode on the CPU.

    `spec` is a folder or name on the Hub of a saved student, which has its own tokenizer; or
    `layers:N` for N evenly spaced layers of the teacher, including the first and the last, with its
    embeddings, norm and head; or `fresh:LAYERSxDIM` for new weights in the teacher's architecture
    (in Llama's without a teacher); or `llama:LAYERSxDIM` for new weights in Llama's architecture.

    Another tokenizer than the teacher's sets the vocabulary size of new weights, rounded up to a
    multiple of 8. `dtype` None keeps the dtype of the file. `quantization` comes from `nf4`. The
    teacher and the global random state are not changed.
    """
    if not is_built(spec):
        return load_causal_lm(spec, dtype=dtype, remote_code=remote_code, quantization=quantization)
    model, tokenizer, processor = _built(spec, teacher, tokenizer, seed)
    cast_weights(model, dtype or torch.float32)
    return CausalLM.of(model, tokenizer, spec, processor)


def outline_student(
    spec: str,
    teacher: CausalLM | None,
    tokenizer: Any = None,
    *,
    remote_code: bool = False,
    quantized: bool = False,
) -> CausalLM:
    """Return the student of `build_student` without weights, as `outline_causal_lm` does."""
    if not is_built(spec):
        return outline_causal_lm(spec, remote_code=remote_code, quantized=quantized)
    with torch.device("meta"):
        model, tokenizer, processor = _built(spec, teacher, tokenizer, seed=0)
    return CausalLM(model, tokenizer, spec, "", processor)


def is_built(spec: str) -> bool:
    """Return whether STUDENT_MODEL describes a model to build, and does not name a saved one."""
    return spec.partition(":")[0] in ("layers", "fresh", "llama")


def _built(
    spec: str, teacher: CausalLM | None, tokenizer: Any, seed: int
) -> tuple[nn.Module, Any, Any]:
    """Return the model that `spec` describes, its tokenizer and its processor."""
    kind, _, size = spec.partition(":")
    match = re.fullmatch(r"(\d+)" if kind == "layers" else r"(\d+)x(\d+)", size)
    if match is None or 0 in (numbers := [int(n) for n in match.groups()]):
        example = "layers:3 (3 of the teacher's layers)" if kind == "layers" else "fresh:2x128"
        raise InputError(
            f"STUDENT_MODEL is {spec!r}; expected {example}, with numbers of at least 1"
        )
    if kind == "layers":
        if teacher is None:
            raise InputError(
                f"STUDENT_MODEL is {spec!r}, which is cut from a teacher: name one in TEACHER_MODEL"
            )
        model, tokenizer = _cut(spec, teacher, numbers[0], seed), teacher.tokenizer
        processor = teacher.processor
    else:
        tokenizer, processor = tokenizer or (teacher and teacher.tokenizer), None
        if tokenizer is None:
            raise InputError(
                f"STUDENT_MODEL is {spec!r}, which needs a tokenizer: name a teacher in "
                "TEACHER_MODEL, whose tokenizer is used"
            )
        if kind == "fresh" and teacher is not None:
            model = _like_teacher(spec, teacher, tokenizer, numbers[0], numbers[1], seed)
        else:
            model = _llama(spec, tokenizer, numbers[0], numbers[1], seed)
    return model, tokenizer, processor


def add_lora(
    model: Any,
    rank: int,
    lora_alpha: float = 16.0,
    *,
    lora_target_modules: str = ALL_LINEAR,
    modules_to_save: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Freeze a model and add trainable float32 low-rank adapters to its linear layers, in place.

    `lora_target_modules` are names of layers, separated by commas, and so are `modules_to_save`, of
    which copies are trained; `options` are those of PEFT's LoraConfig. Until the weights are
    trained, the logits of PEFT's wrapper are the model's. The global random state is not changed.
    """
    check_rank(rank, model.config)
    peft = llm_module("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=lora_alpha,
        target_modules=adapted_layers(model, lora_target_modules),
        # GPT-2 has transposed linear layers.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        **copied_layers(model, modules_to_save),
        **options,
    )
    with seeded(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated transformers names
        return peft.get_peft_model(model, config)


def freeze_tower(model: Any, *, images: bool) -> None:
    """Select the weights of a vision-language model that are trained; leave other models unchanged.

    The language model is trained, the projector only if there are images, the vision tower never.
    """
    if not sees(model):
        return
    decoder = model.get_decoder()
    language = {id(p) for p in (*decoder.parameters(), *model.get_output_embeddings().parameters())}
    for name, parameter in model.named_parameters():
        path = name.split(".")
        in_tower = not _TOWERS.isdisjoint(path) and _PROJECTOR not in path
        parameter.requires_grad = id(parameter) in language or (images and not in_tower)


def adapted_layers(model: Any, wanted: str) -> list[str] | str:
    """Return PEFT's `target_modules`: names as they are, but in full if there is a vision tower."""
    sighted, head = sees(model), model.get_output_embeddings()
    layers = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and module is not head
        and (module.weight.requires_grad or not sighted)
    ]
    if wanted == ALL_LINEAR:
        return layers if sighted else wanted
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if not any(f".{layer}".endswith(f".{name}") for layer in layers):
            known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
            raise InputError(
                f"LORA_TARGET_MODULES is {wanted!r}, but the model has no linear layer {name!r}; "
                f"expected {ALL_LINEAR}, or some of {known}"
            )
    endings = tuple(f".{name}" for name in names)
    return [layer for layer in layers if f".{layer}".endswith(endings)] if sighted else names


def check_rank(rank: int, config: Any) -> None:
    """Raise InputError if a rank exceeds the width of a model, given its configuration or width."""
    width = config
    if not isinstance(config, int):
        towers = [config.get_text_config(), getattr(config, "vision_config", None)]
        widths = [getattr(tower, "hidden_size", 0) for tower in towers]
        width = max(width for width in widths if isinstance(width, int)) or rank
    if rank > width:
        raise InputError(
            f"LORA_RANK is {rank:,}; expected at most {width:,}, the width of the model, above "
            "which a rank adds nothing (8 to 64 is usual)"
        )


def save_student(
    model: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    card: str | Sequence[Mapping[str, Any]],
    *,
    processor: Any = None,
    base: str = "",
    made: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Save a student so that transformers or peft can load it; raise NotFinite for a bad weight.

    Weights (safetensors), configurations, tokenizer and model card are written to a temporary
    folder, which replaces `folder` when it is complete. Adapters are saved without their base model
    if that can be loaded again; if the base was built in memory, a merged copy is saved instead.
    `base` names the model that such a student was cut from; `made` lists its origin for the card.
    """
    folder = Path(folder)
    if (name := not_finite(model)) is not None:
        raise NotFinite(
            f"the weight {name} of the model holds NaN or infinity, so {folder} is not written: "
            "save a checkpoint of an earlier step instead"
        )
    loaded = getattr(without_adapters(model).config, "_name_or_path", "")
    adapters = without_adapters(model) is not model
    if adapters and loaded and (path := Path(loaded).expanduser()).exists():
        for config in model.peft_config.values():  # so that they load from any directory
            config.base_model_name_or_path = str(path.resolve())
    if adapters and not loaded:
        logger.info("the adapters are merged into their base model, which was built in memory")
        model = copy.deepcopy(model)
        cast_weights(model, torch.float32)  # a base in half precision would round the sum
        model, adapters = model.merge_and_unload(), False
    parts = ("lora_", ".modules_to_save.") if adapters else ("",)
    weights = _in_dtype(torch.float32, model, *parts)
    with (
        quiet_transformers(),
        _savable_generation_config(without_adapters(model)) as generation,
        _replaced(folder) as new,
    ):
        model.save_pretrained(new, state_dict=weights)
        if (file := new / "config.json").is_file():  # it has the dtype of the model in memory
            config = json.loads(file.read_text(encoding="utf-8")) | {"dtype": "float32"}
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        generation.save_pretrained(new)  # adapters are saved without it
        (processor or tokenizer).save_pretrained(new)
        pieces = Path(getattr(tokenizer, "vocab_file", None) or "")
        if pieces.name == "tokenizer.model" and pieces.is_file():  # for llama.cpp's converter
            shutil.copy(pieces, new)
        images = processor is not None
        text = model_card(folder.name, card, loaded or base, adapters, images, made)
        (new / "README.md").write_text(text, encoding="utf-8")
        again = llm_module("transformers").AutoTokenizer.from_pretrained(new)
    if tokenizer_id(again) != tokenizer_id(tokenizer):
        # For some architectures (Qwen 2, Phi 3) it uses their usual class, whatever was saved.
        logger.warning(
            "AutoTokenizer loads the tokenizer in %s as another class, which splits text "
            "differently: load this tokenizer with PreTrainedTokenizerFast.from_pretrained",
            folder,
        )


# --- building -------------------------------------------------------------------------------------


def _cut(spec: str, teacher: CausalLM, layers: int, seed: int) -> nn.Module:
    config = teacher.model.config.get_text_config()
    depth = config.num_hidden_layers
    if layers > depth:
        raise InputError(
            f"STUDENT_MODEL is {spec!r}; expected layers:N with N from 1 to {depth}, the number of "
            f"layers of the teacher {teacher.name!r}"
        )
    kept = _evenly(layers, depth)
    stack = f"{stack_of(teacher.model)}."
    state = {}
    for name, tensor in teacher.model.state_dict().items():
        if name.startswith(stack):
            number, _, rest = name.removeprefix(stack).partition(".")
            for new in [i for i, old in enumerate(kept) if old == int(number)]:
                state[f"{stack}{new}.{rest}"] = tensor
        else:
            state[name] = tensor
    values = changed_config(config, kept, {})
    if sees(teacher.model):
        values = {**teacher.model.config.to_dict(), "text_config": values}
    model = _make(spec, values, seed, state)
    model.generation_config = copy.deepcopy(teacher.model.generation_config)
    return model


def stack_of(model: Any) -> str:
    """Return the name of the list of a causal model's decoder layers, such as `model.layers`."""
    causal, start = without_adapters(model), ""
    if sees(causal):  # a vision tower has its own layers
        decoder = causal.get_decoder()
        start = next(f"{name}." for name, module in causal.named_modules() if module is decoder)
    depth = causal.config.get_text_config().num_hidden_layers
    for name, module in causal.named_modules():  # the outermost comes first
        if isinstance(module, nn.ModuleList) and len(module) == depth and name.startswith(start):
            return name
    raise InputError(
        f"{type(causal).__name__} has no list of its {depth} decoder layers: use another model"
    )


def _llama(spec: str, tokenizer: Any, layers: int, dim: int, seed: int) -> nn.Module:
    heads = _heads(dim, dim / _HEAD_DIM)
    config = llm_module("transformers").LlamaConfig(
        vocab_size=8 * math.ceil(n_ids(tokenizer) / 8),
        hidden_size=dim,
        intermediate_size=8 * math.ceil(dim / 3),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        **_special_ids(tokenizer),
    )
    return _make(spec, config, seed)


def _like_teacher(
    spec: str, teacher: CausalLM, tokenizer: Any, layers: int, dim: int, seed: int
) -> nn.Module:
    """Build a model with new weights in the teacher's architecture and proportions."""
    old = teacher.model.config.get_text_config()
    old_head_dim = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    heads = _heads(dim, dim / old_head_dim)
    changes = {"hidden_size": dim, "num_attention_heads": heads, "vocab_size": old.vocab_size}
    same = tokenizer_id(tokenizer) == tokenizer_id(teacher.tokenizer)
    if not same:
        vocabulary = 8 * math.ceil(n_ids(tokenizer) / 8)
        changes |= {"vocab_size": vocabulary, **_special_ids(tokenizer)}
    if getattr(old, "num_key_value_heads", None):
        shared = max(1, heads * old.num_key_value_heads // old.num_attention_heads)
        changes["num_key_value_heads"] = next(n for n in range(shared, 0, -1) if heads % n == 0)
    if getattr(old, "head_dim", None):
        changes["head_dim"] = dim // heads
    if getattr(old, "query_pre_attn_scalar", None) == old_head_dim:
        changes["query_pre_attn_scalar"] = dim // heads
    for name in _WIDTHS:
        if width := getattr(old, name, None):
            changes[name] = 8 * math.ceil(width * dim / old.hidden_size / 8)
    if getattr(old, "word_embed_proj_dim", None) == old.hidden_size:  # may be no multiple of 8
        changes["word_embed_proj_dim"] = dim
    model = _make(spec, changed_config(old, _evenly(layers, old.num_hidden_layers), changes), seed)
    if same:
        model.generation_config = copy.deepcopy(teacher.model.generation_config)
    return model


def _special_ids(tokenizer: Any) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def _evenly(layers: int, depth: int) -> list[int]:
    """Return the indices of evenly spaced layers, including the first and the last."""
    return [round(i * (depth - 1) / max(layers - 1, 1)) for i in range(layers)]


def _heads(dim: int, wanted: float) -> int:
    """Return the number of heads nearest to `wanted` that gives heads of even width."""
    possible = [n for n in range(1, dim + 1) if dim % n == 0 and dim // n % 2 == 0]
    if not possible:
        raise InputError(
            f"STUDENT_MODEL asks for the width {dim}; expected an even width, because rotary "
            "embeddings need attention heads of even width"
        )
    return min(possible, key=lambda n: abs(math.log(n / wanted)))


def changed_config(config: Any, kept: Sequence[int], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration with only the layers `kept`, and with `changes`."""
    values = {k: v for k, v in config.to_dict().items() if k != "quantization_config"}
    for name, value in values.items():  # lists such as layer_types have an entry per layer
        if isinstance(value, list) and len(value) == config.num_hidden_layers and "layer" in name:
            values[name] = [value[i] for i in kept]
    for name, value in {"num_hidden_layers": len(kept), **changes}.items():
        values[config.attribute_map.get(name, name)] = value
    return values


def _make(
    spec: str, config: Any, seed: int, state: Mapping[str, torch.Tensor] | None = None
) -> Any:
    """Build a model with new weights or those in `state`, and check that it runs."""
    transformers = llm_module("transformers")
    try:
        if isinstance(config, dict):
            config = transformers.AutoConfig.for_model(**config)
        config.name_or_path = ""  # not the teacher's
        with seeded(seed):
            model = auto_model(config).from_config(config, dtype=torch.float32)
        model.eval()
        if model.device.type == "meta":  # an outline
            return model
        if state is not None:
            model.load_state_dict(state)
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except Exception as error:  # each architecture raises its own exceptions
        if is_out_of_memory(error):
            raise UserError(
                f"STUDENT_MODEL is {spec!r}, whose weights do not fit into memory: choose a "
                "smaller width or fewer layers"
            ) from error
        raise InputError(
            f"STUDENT_MODEL is {spec!r}, which cannot be built in the teacher's architecture "
            f"({brief(error)}): use another size, or a folder written by save_pretrained"
        ) from error
    return model


# --- saving ---------------------------------------------------------------------------------------


def save_for_server(model: Any, folder: Path, dtype: torch.dtype) -> bool:
    """Save a model's adapters in float32, or all weights in `dtype`; return whether adapters."""
    causal = without_adapters(model)
    part, dtype = ("", dtype) if causal is model else ("lora_", torch.float32)
    with quiet_transformers(), _savable_generation_config(causal):
        model.save_pretrained(folder, state_dict=_in_dtype(dtype, model, part))
    return causal is not model


def _in_dtype(dtype: torch.dtype, model: nn.Module, *parts: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names contain one of `parts`, in a dtype; tied weights stay tied."""
    converted: dict[tuple[int, torch.Size], torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        if not any(part in name for part in parts):
            continue
        key = tensor.data_ptr(), tensor.shape
        if key not in converted or not tensor.numel():
            converted[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        state[name] = converted[key]
    return state


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` once it is complete and on disk."""
    if folder.exists() and any(folder.iterdir()):
        if not any((folder / f).is_file() for f in ("config.json", "adapter_config.json")):
            raise FileExistsError(
                f"the folder {folder} holds something other than a saved model: choose "
                "another folder, or move its content"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    tag = secrets.token_hex(4)
    new, old = (folder.with_name(f".{folder.name}.{tag}.{kind}") for kind in ("tmp", "old"))
    new.mkdir()
    try:
        yield new
        for file in new.iterdir():
            with open(file, "rb+") as handle:
                os.fsync(handle.fileno())
        sync_folder(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    sync_folder(folder.parent)


@contextmanager
def _savable_generation_config(causal: Any) -> Iterator[Any]:
    """Use a copy of the generation configuration that transformers does not refuse to write.

    Some configurations on the Hub have a temperature without sampling, which is refused.
    """
    before = causal.generation_config
    causal.generation_config = copy.deepcopy(before)
    try:
        causal.generation_config.validate(strict=True)
    except ValueError:
        causal.generation_config.do_sample = True
    try:
        yield causal.generation_config
    finally:
        causal.generation_config = before
