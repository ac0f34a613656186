"""Students: load them, cut them from a teacher or build new ones, add adapters, save them."""

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
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ssl_kd.errors import InputError, UserError
from ssl_kd.files import sync_folder
from ssl_kd.guard.memory import is_out_of_memory
from ssl_kd.guard.seeds import seeded
from ssl_kd.teachers.card import model_card
from ssl_kd.teachers.causal import (
    CausalLM,
    auto_model,
    llm_module,
    load_causal_lm,
    n_ids,
    quiet,
    sees,
    tokenizer_id,
    without_adapters,
)
from ssl_kd.teachers.dtypes import cast_weights
from ssl_kd.teachers.finite import not_finite
from ssl_kd.teachers.layers import stack_of, trained_linears
from ssl_kd.teachers.quantization import Quantization

logger = logging.getLogger(__name__)

# Configuration values that scale with the width, as different families call them.
_WIDTHS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "word_embed_proj_dim",
)
_HEAD_DIM = 64  # of a new Llama, if the width allows it


class NotFinite(UserError, ValueError):
    """A model with a NaN or an infinity in its weights, which is therefore not saved."""


def build_student(
    spec: str,
    teacher: CausalLM | None,
    tokenizer: Any = None,
    *,
    seed: int,
    dtype: torch.dtype | None = torch.float32,
    remote_code: bool = False,
    quantization: Quantization | None = None,
) -> CausalLM:
    """Build or load a student, in evaluation mode on the CPU.

    Args:
        spec: a folder or a name on the Hub, which has its own tokenizer; `layers:N`, N evenly
            spaced layers of the teacher including first and last, with its embeddings, norm and
            head; `fresh:LAYERSxDIM`, new weights of that size in the teacher's architecture, or in
            Llama's without a teacher; or `llama:LAYERSxDIM`, new weights in Llama's architecture.
        teacher: the model to cut, or whose architecture to use. It is not changed.
        tokenizer: for new weights; None for the teacher's. The vocabulary size is the teacher's if
            it has this tokenizer, else the tokenizer's, rounded up to a multiple of 8.
        seed: of new weights; the global random state is not changed.
        dtype: of the weights; None for that of the file, or float32.
        remote_code: see `load_causal_lm`.
        quantization: of a loaded student, as the frozen base of adapters.

    Raises:
        ValueError: an invalid `spec`, more layers than the teacher has, or a size or architecture
            that does not work.
        FileNotFoundError, CausalLMUnavailable: as `load_causal_lm`.
    """
    kind, _, size = spec.partition(":")
    if kind not in ("layers", "fresh", "llama"):
        return load_causal_lm(spec, dtype=dtype, remote_code=remote_code, quantization=quantization)
    match = re.fullmatch(r"(\d+)" if kind == "layers" else r"(\d+)x(\d+)", size)
    if match is None or 0 in (numbers := [int(n) for n in match.groups()]):
        example = "layers:3 (3 of the teacher's layers)" if kind == "layers" else "fresh:2x128"
        raise InputError(f"student {spec!r}: expected {example}, with numbers of at least 1")
    if kind == "layers":
        if teacher is None:
            raise InputError(f"student {spec!r} is cut from a teacher's layers: name a teacher")
        model, tokenizer = _cut(spec, teacher, numbers[0], seed), teacher.tokenizer
        processor = teacher.processor
    else:
        tokenizer, processor = tokenizer or (teacher and teacher.tokenizer), None
        if tokenizer is None:
            raise InputError(f"student {spec!r} needs a tokenizer, or a teacher that has one")
        if kind == "fresh" and teacher is not None:
            model = _like_teacher(spec, teacher, tokenizer, numbers[0], numbers[1], seed)
        else:
            model = _llama(spec, tokenizer, numbers[0], numbers[1], seed)
    cast_weights(model, dtype or torch.float32)
    return CausalLM.of(model, tokenizer, spec, processor)


def add_lora(model: Any, rank: int, alpha: float = 16.0, *, seed: int = 0) -> Any:
    """Freeze a model and add trainable low-rank adapters to its linear layers, in place.

    Args:
        model: a causal language model of transformers.
        rank: of the adapters, at least 1.
        alpha: their scale, times 1 / rank.
        seed: of their new weights, which are float32; the global random state is not changed.

    Returns:
        PEFT's wrapper of the model; with untrained adapters the logits are the same as before.

    Raises:
        ImportError: peft is not installed.
        ValueError: a rank that does not work.
    """
    if rank < 1:
        raise InputError(f"adapters need a rank of at least 1, got LORA_RANK {rank}")
    check_rank(rank, model.config)
    peft = llm_module("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        target_modules=trained_linears(model) if sees(model) else "all-linear",
        # GPT-2 has transposed linear layers.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    with seeded(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated transformers names
        return peft.get_peft_model(model, config)


def check_rank(rank: int, config: Any) -> None:
    """Raise InputError if the rank of adapters is above the rank of their matrices.

    Args:
        rank: of the adapters.
        config: of the model, or its width, which one side of each matrix does not exceed.
    """
    width = config
    if not isinstance(config, int):
        towers = [config.get_text_config(), getattr(config, "vision_config", None)]
        widths = [getattr(tower, "hidden_size", 0) for tower in towers]
        width = max(width for width in widths if isinstance(width, int)) or rank
    if rank > width:
        raise InputError(
            f"LORA_RANK is {rank:,}, but a model of width {width:,} learns nothing more from a "
            f"rank above {width:,}: set it to that or less; 8 to 64 is usual"
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
    """Save a student for `AutoModelForCausalLM` (with images `AutoModelForImageTextToText`).

    Weights (safetensors), configuration, generation configuration, tokenizer and model card are
    written to a temporary folder, which replaces `folder` when it is complete.

    Args:
        model: the student. Adapters are saved without their base, for peft; if the base was built
            in memory and so could not be loaded, a copy of the model is merged and saved instead.
        tokenizer: its tokenizer.
        folder: where to save it.
        card: Markdown, or the rows of a table for the model card.
        processor: of a model of images and text, for `AutoProcessor`.
        base: the model from which one built in memory was cut.
        made: for the model card: the teacher, the data, the settings.

    Raises:
        NotFinite: a weight holds a NaN or an infinity; nothing is written.
        FileExistsError: the folder holds something other than a saved model.
        OSError: the disk is full or failed; an existing folder is unchanged.
    """
    folder = Path(folder)
    if (name := not_finite(model)) is not None:
        raise NotFinite(
            f"{folder} is not written: {name} of the model holds NaN or infinity. A checkpoint of "
            "an earlier step, or the model that training started from, may be sound"
        )
    loaded = getattr(without_adapters(model).config, "_name_or_path", "")
    adapters = without_adapters(model) is not model
    if adapters and loaded and (path := Path(loaded).expanduser()).exists():
        for config in model.peft_config.values():  # so that they load from any directory
            config.base_model_name_or_path = str(path.resolve())
    if adapters and not loaded:
        logger.info("the adapters are merged into their base, which was built in memory")
        model = copy.deepcopy(model)
        cast_weights(model, torch.float32)  # a base in half precision would round the sum
        model, adapters = model.merge_and_unload(), False
    transformers = llm_module("transformers")
    weights = _in_float32(model, "lora_" if adapters else "")
    with (
        quiet(transformers),
        _savable_generation_config(without_adapters(model)) as generation,
        _replaced(folder) as new,
    ):
        model.save_pretrained(new, state_dict=weights)
        if (file := new / "config.json").is_file():  # it has the dtype of the model in memory
            config = json.loads(file.read_text(encoding="utf-8")) | {"dtype": "float32"}
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        generation.save_pretrained(new)  # adapters are saved without it
        (processor or tokenizer).save_pretrained(new)
        images = processor is not None
        text = model_card(folder.name, card, loaded or base, adapters, images, made)
        (new / "README.md").write_text(text, encoding="utf-8")
        again = transformers.AutoTokenizer.from_pretrained(new)
    if tokenizer_id(again) != tokenizer_id(tokenizer):
        # For some architectures (Qwen 2, Phi 3) it uses their usual class, whatever was saved.
        logger.warning(
            "AutoTokenizer loads the tokenizer in %s as another class, which splits text "
            "differently: load it with PreTrainedTokenizerFast.from_pretrained",
            folder,
        )


# --- building -------------------------------------------------------------------------------------


def _cut(spec: str, teacher: CausalLM, layers: int, seed: int) -> nn.Module:
    config = teacher.model.config.get_text_config()
    depth = config.num_hidden_layers
    if layers > depth:
        raise InputError(
            f"student {spec!r}: the teacher {teacher.name!r} has {depth} layers; expected layers:N "
            f"with N from 1 to {depth}"
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
    values = _changed(config, kept, {})
    if sees(teacher.model):
        values = {**teacher.model.config.to_dict(), "text_config": values}
    model = _make(spec, values, seed, state)
    model.generation_config = copy.deepcopy(teacher.model.generation_config)
    return model


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
    """Build a model in the teacher's architecture, with its proportions."""
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
    model = _make(spec, _changed(old, _evenly(layers, old.num_hidden_layers), changes), seed)
    if same:
        model.generation_config = copy.deepcopy(teacher.model.generation_config)
    return model


def _special_ids(tokenizer: Any) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def _evenly(layers: int, depth: int) -> list[int]:
    """Return evenly spaced layers of a depth, including the first and the last."""
    return [round(i * (depth - 1) / max(layers - 1, 1)) for i in range(layers)]


def _heads(dim: int, wanted: float) -> int:
    """Return the number of heads nearest to `wanted` whose width is even, for rotary embeddings."""
    possible = [n for n in range(1, dim + 1) if dim % n == 0 and dim // n % 2 == 0]
    if not possible:
        raise InputError(f"a model of width {dim} has no heads of even width: use an even width")
    return min(possible, key=lambda n: abs(math.log(n / wanted)))


def _changed(config: Any, kept: Sequence[int], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration with only some of its layers, and other changes."""
    values = {k: v for k, v in config.to_dict().items() if k != "quantization_config"}
    for name, value in values.items():  # such as layer_types: one entry per layer
        if isinstance(value, list) and len(value) == config.num_hidden_layers and "layer" in name:
            values[name] = [value[i] for i in kept]
    for name, value in {"num_hidden_layers": len(kept), **changes}.items():
        values[config.attribute_map.get(name, name)] = value
    return values


def _make(
    spec: str, config: Any, seed: int, state: Mapping[str, torch.Tensor] | None = None
) -> Any:
    """Build a model with new weights, or with those of `state`, and check that it runs."""
    transformers = llm_module("transformers")
    try:
        if isinstance(config, dict):
            config = transformers.AutoConfig.for_model(**config)
        config.name_or_path = ""  # a copy has the teacher's
        with seeded(seed):
            model = auto_model(config).from_config(config, dtype=torch.float32)
        if state is not None:
            model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except Exception as error:  # each architecture raises its own exceptions
        if is_out_of_memory(error):
            raise UserError(
                f"student {spec!r}: its weights alone do not fit into memory: name a smaller width "
                "or fewer layers"
            ) from error
        reason = shorten(str(error) or type(error).__name__, 200, placeholder=" …")
        raise InputError(
            f"student {spec!r} cannot be built in the teacher's architecture ({reason}): use "
            "another size, or a folder written by save_pretrained"
        ) from error
    return model


# --- saving ---------------------------------------------------------------------------------------


def _in_float32(model: nn.Module, part: str) -> dict[str, torch.Tensor]:
    """Return the state of names that contain `part`, in float32; tied weights stay tied."""
    converted: dict[tuple[int, torch.Size], torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        if part not in name:
            continue
        key = tensor.data_ptr(), tensor.shape
        if key not in converted or not tensor.numel():
            converted[key] = tensor.float() if tensor.is_floating_point() else tensor
        state[name] = converted[key]
    return state


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` once it is complete and on disk."""
    if folder.exists() and any(folder.iterdir()):
        if not any((folder / f).is_file() for f in ("config.json", "adapter_config.json")):
            raise FileExistsError(
                f"{folder} holds something other than a saved model: name another folder, or "
                "remove it"
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
    """Use a generation configuration that transformers agrees to write.

    Some on the Hub have a temperature without sampling, which it refuses.
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
