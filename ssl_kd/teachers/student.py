"""Students: loaded, cut from a teacher's layers or new; adapters; and the folder they end in."""

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
from ssl_kd.teachers.layers import stack_of
from ssl_kd.teachers.quantization import Quantization
from ssl_kd.teachers.tower import trained_linears

logger = logging.getLogger(__name__)

# What scales with the width of a model, as configurations of different families call it.
_WIDTHS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "word_embed_proj_dim",
)
_HEAD_DIM = 64  # of a new Llama, where the width allows it


class NotFinite(UserError, ValueError):
    """A model that holds a NaN or an infinity, and is therefore not written."""


def build_student(
    spec: str,
    teacher: CausalLM | None,
    tokenizer: Any = None,
    *,
    seed: int,
    dtype: torch.dtype | None = torch.float32,
    experts: int = 0,
    remote_code: bool = False,
    quantization: Quantization | None = None,
) -> CausalLM:
    """Make or load a student.

    Args:
        spec: a folder or a name on the Hub (the student then has its own tokenizer); `layers:N`, N
            evenly spaced layers of the teacher, first and last included, with its embeddings, norm
            and head; `fresh:LAYERSxDIM`, new weights of that size in the teacher's architecture,
            or in Llama's without a teacher; or `llama:LAYERSxDIM`, new weights in Llama's anyway.
        teacher: what to cut, or whose architecture to take. It is left alone.
        tokenizer: for new weights; None takes the teacher's. The vocabulary is the teacher's where
            that has this tokenizer, else the tokenizer's, up to the next multiple of 8.
        seed: of new weights; the global random state is left alone.
        dtype: float32, but for the frozen base of adapters; None for that of its file, or float32.
        experts: for new weights without a teacher: a Mixtral of so many, two of them active, in
            Llama's place; 0 for Llama.
        remote_code: see `load_causal_lm`.
        quantization: of a student that is loaded, the frozen base of adapters.

    Returns:
        The student, in evaluation mode on the CPU.

    Raises:
        ValueError: the form of `spec`, more layers than there are, a size or an architecture that
            does not work.
        FileNotFoundError, CausalLMUnavailable: as by `load_causal_lm`.
    """
    kind, _, size = spec.partition(":")
    if kind not in ("layers", "fresh", "llama"):
        return load_causal_lm(spec, dtype=dtype, remote_code=remote_code, quantization=quantization)
    form = r"(\d+)" if kind == "layers" else r"(\d+)x(\d+)"
    match = re.fullmatch(form, size)
    if match is None or 0 in (numbers := [int(n) for n in match.groups()]):
        way = "layers:3 (3 of the teacher's layers)" if kind == "layers" else "fresh:2x128"
        raise InputError(f"student {spec!r}: expected {way}, with numbers of at least 1")
    if kind == "layers":
        if teacher is None:
            raise InputError(f"student {spec!r} is cut from a teacher's layers: name a teacher")
        model, tokenizer = _cut(spec, teacher, numbers[0], seed), teacher.tokenizer
    else:
        if tokenizer is None:
            if teacher is None:
                raise InputError(f"student {spec!r} needs a tokenizer, or a teacher that has one")
            tokenizer = teacher.tokenizer
        like = teacher if kind == "fresh" else None
        model = _fresh(spec, like, tokenizer, numbers[0], numbers[1], seed, experts)
    cast_weights(model, dtype or torch.float32)
    processor = teacher.processor if kind == "layers" and teacher is not None else None
    return CausalLM.of(model, tokenizer, spec, processor)


def add_lora(
    model: Any,
    rank: int,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: str | Sequence[str] = "all-linear",
    *,
    seed: int = 0,
) -> Any:
    """Freeze a model and put trainable low-rank adapters beside its linear layers, in place.

    Args:
        model: a causal language model of transformers.
        rank: of the adapters, at least 1.
        alpha: their scale, times 1 / rank.
        dropout: of their input, in [0, 1).
        targets: names of layers, or `all-linear` for all but the head and what is frozen.
        seed: of their new weights, which are float32; the global random state is left alone.

    Returns:
        PEFT's wrapping of the model; with the adapters as they are now it gives the same logits.

    Raises:
        ImportError: peft is not installed.
        ValueError: a rank, dropout or target that does not work.
    """
    if targets == "all-linear" and sees(model):
        targets = trained_linears(model)
    if rank < 1 or not 0 <= dropout < 1:
        raise InputError(
            f"adapters need a rank of at least 1 and a dropout in [0, 1), got {rank} and {dropout}"
        )
    check_rank(rank, model.config)
    peft = llm_module("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        # GPT-2 keeps its linear layers transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    with seeded(seed), warnings.catch_warnings():
        # peft asks transformers by names that are deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, config)


def check_rank(rank: int, config: Any) -> None:
    """Raise InputError where adapters have a higher rank than the matrices that they change.

    Args:
        rank: of the adapters.
        config: of the model, or its width: one side of each matrix is at most that.
    """
    largest = config
    if not isinstance(config, int):
        towers = [config.get_text_config(), getattr(config, "vision_config", None)]
        widths = [getattr(tower, "hidden_size", 0) for tower in towers]
        largest = max(width for width in widths if isinstance(width, int)) or rank
    if rank > largest:
        raise InputError(
            f"LORA_RANK is {rank:,}, and a model that is {largest:,} wide learns no more by it than"
            f" by {largest:,}: set it to that or less; 8 to 64 is usual"
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
    """Write a student that `AutoModelForCausalLM` loads, or adapters that peft loads.

    One of images and text is for `AutoModelForImageTextToText`.

    Weights (safetensors), configuration, generation configuration, tokenizer and model card are
    written beside the folder and take its name when they are complete, in place of what was there.

    Args:
        model: the student; adapters are saved without their base, but merged into one that was made
            in memory: they could not be loaded alone. The model itself keeps its adapters.
        tokenizer: its tokenizer.
        folder: where to.
        card: Markdown, or the rows of the run's table: one mapping of columns each.
        processor: of a model of images and text, for `AutoProcessor`.
        base: the model that one made in memory was cut from.
        made: how it came to be, for the card: the teacher, the data, the settings.

    Raises:
        NotFinite: a weight holds a NaN or an infinity; nothing is written.
        FileExistsError: the folder holds something other than a saved model.
        OSError: the disk is full or failed; a folder already there is unchanged.
    """
    folder = Path(folder)
    if (sick := not_finite(model)) is not None:
        raise NotFinite(
            f"{folder} is not written: {sick} of the model holds NaN or infinity. A checkpoint of "
            "an earlier step, or the model that training began with, may be well"
        )
    loaded = getattr(without_adapters(model).config, "_name_or_path", "")
    adapters = without_adapters(model) is not model
    if adapters and loaded and (place := Path(loaded).expanduser()).exists():
        for config in model.peft_config.values():  # they are loaded from elsewhere, too
            config.base_model_name_or_path = str(place.resolve())
    if adapters and not loaded:
        logger.info("the adapters are merged into their base, which was made in memory")
        model = copy.deepcopy(model)
        cast_weights(model, torch.float32)  # a base in half precision would round what is added
        model, adapters = model.merge_and_unload(), False
    causal = without_adapters(model)
    transformers = llm_module("transformers")
    weights = _in_float32(model, "lora_" if adapters else "")
    with quiet(transformers), _generation(causal) as generation, _replaced(folder) as new:
        model.save_pretrained(new, state_dict=weights)
        if (file := new / "config.json").is_file():  # it says what the model in memory has
            config = json.loads(file.read_text(encoding="utf-8")) | {"dtype": "float32"}
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        generation.save_pretrained(new)  # adapters come without
        (processor or tokenizer).save_pretrained(new)
        sees_images = processor is not None
        text = model_card(folder.name, card, loaded or base, adapters, sees_images, made)
        (new / "README.md").write_text(text, encoding="utf-8")
        again = transformers.AutoTokenizer.from_pretrained(new)
    if tokenizer_id(again) != tokenizer_id(tokenizer):
        # For some architectures (Qwen 2, Phi 3) it takes the class that they usually have.
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


def _fresh(
    spec: str,
    teacher: CausalLM | None,
    tokenizer: Any,
    layers: int,
    dim: int,
    seed: int,
    experts: int,
) -> nn.Module:
    vocabulary = 8 * math.ceil(n_ids(tokenizer) / 8)
    special = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    if teacher is None:
        heads = _heads(dim, dim / _HEAD_DIM)
        transformers = llm_module("transformers")
        mixed = {"num_local_experts": experts, "num_experts_per_tok": 2} if experts else {}
        config = (transformers.MixtralConfig if experts else transformers.LlamaConfig)(
            vocab_size=vocabulary,
            hidden_size=dim,
            intermediate_size=8 * math.ceil(dim / 3),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            tie_word_embeddings=True,
            **special,
            **mixed,
        )
        return _make(spec, config, seed)
    old = teacher.model.config.get_text_config()
    same = tokenizer_id(tokenizer) == tokenizer_id(teacher.tokenizer)
    if same:
        vocabulary = old.vocab_size
    changes = {"hidden_size": dim, "vocab_size": vocabulary, **({} if same else special)}
    old_head_dim = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    heads = _heads(dim, dim / old_head_dim)
    changes["num_attention_heads"] = heads
    if getattr(old, "num_key_value_heads", None):
        shared = max(1, heads * old.num_key_value_heads // old.num_attention_heads)
        changes["num_key_value_heads"] = next(n for n in range(shared, 0, -1) if heads % n == 0)
    if getattr(old, "head_dim", None):
        changes["head_dim"] = dim // heads
    if getattr(old, "query_pre_attn_scalar", None) == old_head_dim:
        changes["query_pre_attn_scalar"] = dim // heads
    for name in _WIDTHS:
        width = getattr(old, name, None)
        if width:
            changes[name] = 8 * math.ceil(width * dim / old.hidden_size / 8)
    if getattr(old, "word_embed_proj_dim", None) == old.hidden_size:  # not a multiple of 8, perhaps
        changes["word_embed_proj_dim"] = dim
    model = _make(spec, _changed(old, _evenly(layers, old.num_hidden_layers), changes), seed)
    if same:
        model.generation_config = copy.deepcopy(teacher.model.generation_config)
    return model


def _evenly(layers: int, depth: int) -> list[int]:
    """Evenly spaced layers of a depth, the first and the last among them."""
    return [round(i * (depth - 1) / max(layers - 1, 1)) for i in range(layers)]


def _heads(dim: int, wished: float) -> int:
    """How many heads: divides the width into even parts (rotary), nearest to what is wished for."""
    possible = [n for n in range(1, dim + 1) if dim % n == 0 and dim // n % 2 == 0]
    if not possible:
        raise InputError(f"a model of width {dim} has no heads of even width: take an even one")
    return min(possible, key=lambda n: abs(math.log(n / wished)))


def _changed(config: Any, kept: Sequence[int], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration with some of its layers and other changes."""
    values = {k: v for k, v in config.to_dict().items() if k != "quantization_config"}
    for name, value in values.items():  # layer_types, no_rope_layers, ...: an entry per layer
        if isinstance(value, list) and len(value) == config.num_hidden_layers and "layer" in name:
            values[name] = [value[i] for i in kept]
    for name, value in {"num_hidden_layers": len(kept), **changes}.items():
        values[config.attribute_map.get(name, name)] = value
    return values


def _make(
    spec: str, config: Any, seed: int, state: Mapping[str, torch.Tensor] | None = None
) -> Any:
    """A model of a configuration that works: new weights, or those of `state`, all of them."""
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
    except Exception as error:  # each architecture has its own way to say what does not fit
        if is_out_of_memory(error):
            raise UserError(
                f"student {spec!r}: its weights alone do not fit into memory: name a smaller width "
                "or fewer layers"
            ) from error
        reason = shorten(str(error) or type(error).__name__, 200, placeholder=" …")
        raise InputError(
            f"student {spec!r} cannot be made in the teacher's architecture ({reason}): take "
            "another size, or a folder by save_pretrained"
        ) from error
    return model


# --- saving ---------------------------------------------------------------------------------------


def _in_float32(model: nn.Module, part: str) -> dict[str, torch.Tensor]:
    """A model's state in float32, of the names with `part` in them; a tied weight stays tied."""
    once: dict[tuple[int, torch.Size], torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        if part not in name:
            continue
        key = tensor.data_ptr(), tensor.shape
        if key not in once or not tensor.numel():
            once[key] = tensor.float() if tensor.is_floating_point() else tensor
        state[name] = once[key]
    return state


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A new folder that takes the name of `folder` once it is complete and on the disk."""
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
def _generation(causal: Any) -> Iterator[Any]:
    """A model with a generation configuration that can be saved, for as long as it is saved.

    Some on the Hub have a temperature without sampling, which transformers refuses to write.
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
