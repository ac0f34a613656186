"""Load causal language models, with or without adapters, and compute their identities."""

from __future__ import annotations

import copy
import hashlib
import importlib
import io
import json
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ssl_kd.core.errors import InputError, MissingPackage, UserError, brief
from ssl_kd.core.files import sha256_file, why_refused
from ssl_kd.core.memory import is_out_of_memory
from ssl_kd.core.quiet import quiet_transformers
from ssl_kd.core.shards.fingerprint import weights_id
from ssl_kd.language.models.dtypes import cast_weights, keep_gradients
from ssl_kd.language.models.source import ModelSource, find_model
from ssl_kd.language.models.weight_files import model_files

logger = logging.getLogger(__name__)

_BASE = "set base_model_name_or_path in adapter_config.json to the model they were trained on"


class CausalLMUnavailable(UserError, RuntimeError):
    """Raised if a model's files cannot be found or downloaded; the message lists alternatives."""

    def __init__(self, name: str, reason: object) -> None:
        super().__init__(
            f"language model {name!r} is not available ({brief(reason, 260)}); name a folder "
            "written by save_pretrained, check the name on the Hub, or, without a network, run "
            f"hf download {name} on another machine and copy its Hugging Face cache"
        )


@dataclass(frozen=True)
class CausalLM:
    """A causal language model and its tokenizer."""

    model: Any  # of transformers, with `logits` in its output
    tokenizer: Any
    name: str  # path or Hub name, or the specification that it was built from
    weights_id: str  # hexadecimal digest of configuration and weights
    processor: Any = None  # of a model of images and text

    @classmethod
    def of(cls, model: Any, tokenizer: Any, name: str, processor: Any = None) -> CausalLM:
        """Wrap a model that was built in memory; its identity depends on its current weights."""
        content = f"{model.config.to_json_string()}\n{weights_id(model)}"
        return cls(model, tokenizer, name, _short_id(content), processor)


def load_causal_lm(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.float32,
    remote_code: bool = False,
    quantization: Mapping[str, Any] | None = None,
) -> CausalLM:
    """Load a causal language model and its tokenizer, in evaluation mode on the CPU.

    The name is that of a folder, of a GGUF file, of a model in a package, or on the Hub
    (`find_model`). The weights of a GGUF file are dequantized. A model of images and text is loaded
    with its processor. A folder of LoRA adapters is loaded with its base model in float32, merged
    into the base, and then cast to `dtype` (None: the dtype of the file). Buffers, such as rotary
    frequencies, keep their dtype.
    """
    name = os.fspath(name_or_path)
    source = find_model(name)
    _check_quantized(source, quantization is not None)
    folder = source.folder
    if folder is not None and (base := _base_of_adapters(folder)) is not None:
        _check_adapters(folder, base, quantization is not None)
        return _load_adapted(folder, base, dtype, remote_code)
    with quiet_transformers():
        model = _load_model(source, dtype, remote_code, quantization or {})
        keep_gradients(model)
        stacked = [p for p in model.parameters() if p.ndim > 2 and p.is_floating_point()]
        if quantization is not None and (unpacked := sum(p.nbytes for p in stacked)):
            message = "the experts of %s are not linear layers: %.0f MiB are not quantized"
            logger.warning(message, name, unpacked / 2**20)
        tokenizer = _load_tokenizer(source, remote_code)
        processor = _load_processor(source.path, remote_code) if sees(model) else None
    model.eval()
    if (code := type(model).__module__).startswith("transformers_modules."):
        logger.warning("TRUST_REMOTE_CODE is set, so %s runs its own Python code: %s", name, code)
    _check_causal(model, name)
    return CausalLM(model, tokenizer, name, files_id(name), processor)


def outline_causal_lm(
    name_or_path: str | os.PathLike[str], *, remote_code: bool = False, quantized: bool = False
) -> CausalLM:
    """Return what a model's configuration and tokenizer files tell of it, without its weights.

    The model is on the meta device, or None if its class cannot be built there. Its identity is
    empty. Errors are those of `load_causal_lm`, which sees the weights, too.
    """
    name = os.fspath(name_or_path)
    source = find_model(name)
    _check_quantized(source, quantized)
    folder = source.folder
    if folder is not None and (base := _base_of_adapters(folder)) is not None:
        _check_adapters(folder, base, quantized)
        lm = outline_causal_lm(base, remote_code=remote_code)
        return replace(lm, name=str(folder), tokenizer=_own_tokenizer(folder, lm, remote_code))
    if folder is not None and not any(file.is_file() for file in model_files(folder)):
        raise CausalLMUnavailable(name, f"{folder} has no weights, such as model.safetensors")
    with quiet_transformers(), _as_user_error(source):
        model = _on_meta(_load_config(source, remote_code), remote_code)
        tokenizer = _load_tokenizer(source, remote_code)
        processor = None
        if model is not None and sees(model):
            processor = _load_processor(source.path, remote_code)
    return CausalLM(model, tokenizer, name, "", processor)


def _on_meta(config: Any, remote_code: bool) -> Any:
    """Build a model on the meta device; return None if its class needs real tensors for that."""
    try:
        with torch.device("meta"):
            return auto_model(config).from_config(config, trust_remote_code=remote_code).eval()
    except Exception as error:  # each architecture raises its own exceptions
        if "Unrecognized configuration class" in str(error) or "trust_remote_code" in str(error):
            raise
        logger.debug("%s is not built on the meta device", type(config).__name__, exc_info=True)
        return None


def sees(model: Any) -> bool:
    """Return whether a model accepts images as well as text."""
    return getattr(without_adapters(model).config, "vision_config", None) is not None


def auto_model(config: Any) -> Any:
    """Return the auto class of transformers that builds a model from a configuration."""
    transformers = llm_module("transformers")
    both = all(getattr(config, f"{part}_config", None) for part in ("vision", "text"))
    if both and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def load_config(name_or_path: str | os.PathLike[str], *, remote_code: bool = False) -> Any:
    """Load the configuration of transformers of a model that `find_model` finds."""
    source = find_model(name_or_path)
    with _as_user_error(source):
        return _load_config(source, remote_code)


def load_tokenizer(name_or_path: str | os.PathLike[str], *, remote_code: bool = False) -> Any:
    """Load the tokenizer of a model that `find_model` finds, or of a folder without a model."""
    folder = Path(name_or_path).expanduser()
    source = ModelSource(str(folder)) if folder.is_dir() else find_model(name_or_path)
    return _load_tokenizer(source, remote_code)


def files_id(name_or_path: str | os.PathLike[str]) -> str:
    """Return a shortened SHA-256 of the configuration and weight files of a model or adapters."""
    source = find_model(name_or_path)
    if source.gguf:
        return sha256_file(Path(source.name))[:16]
    folder = source.folder
    if folder is None:
        cached_file = llm_module("transformers.utils").cached_file
        try:
            folder = Path(str(cached_file(source.path, "config.json"))).parent
        except OSError as error:
            raise CausalLMUnavailable(source.path, error) from error
    files = [folder / "config.json", *sorted(folder.glob("adapter_*")), *model_files(folder)]
    parts = [f"{f.name} {sha256_file(f)}" for f in files if f.is_file()]
    if base := _base_of_adapters(folder):
        parts.append(f"base {files_id(base)}")
    return _short_id("\n".join(parts))


def tokenizer_id(tokenizer: Any) -> str:
    """Return a digest of a tokenizer; tokenizers of one digest give equal ids for any text.

    The settings of a fast tokenizer for padding and truncation are ignored.
    """
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
    else:
        kind, special = type(tokenizer).__name__, repr(tokenizer.special_tokens_map)
        state = [kind, tokenizer.get_vocab(), special]
    return _short_id(json.dumps(state, sort_keys=True))


def n_ids(tokenizer: Any) -> int:
    """Return the largest token id plus one; this exceeds `len(tokenizer)` if ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def positions(model: Any) -> int | None:
    """Return the longest sequence that a model supports; None if its configuration names none."""
    config = without_adapters(model).config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or None


def without_adapters(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, with active adapters; else the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def llm_module(name: str) -> ModuleType:
    """Import a module that the language mode needs; if it is missing, name the pip command."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage(
            f"the language mode needs {name.partition('.')[0]}, which cannot be imported "
            f"({brief(error)}): pip install 'ssl_kd[llm]'"
        ) from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients, and restore each module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


# --- loading --------------------------------------------------------------------------------------


def _once(load: Callable[[ModelSource, bool], Any]) -> Callable[[ModelSource, bool], Any]:
    """Make a loader read a GGUF file once, as that takes seconds, and return copies after that."""
    kept = lru_cache(maxsize=4)(lambda source, remote_code, state: load(source, remote_code))

    @wraps(load)
    def copied(source: ModelSource, remote_code: bool) -> Any:
        if source.gguf is None:
            return load(source, remote_code)
        file = os.stat(source.name)
        return copy.deepcopy(kept(source, remote_code, (file.st_mtime_ns, file.st_size)))

    return copied


@_once
def _load_config(source: ModelSource, remote_code: bool) -> Any:
    auto = llm_module("transformers").AutoConfig
    return auto.from_pretrained(source.path, trust_remote_code=remote_code, **source.options)


@_once
def _load_tokenizer(source: ModelSource, remote_code: bool) -> Any:
    auto = llm_module("transformers").AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(
            source.path, trust_remote_code=remote_code, **source.options
        )
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("the vocabulary holds only special tokens")
        return tokenizer
    except Exception as error:  # each kind of tokenizer raises its own exceptions
        _check_remote_code(source.path, error)
        raise InputError(
            f"{source.name!r} has no readable tokenizer ({brief(error)}): save one next to its "
            "config.json with tokenizer.save_pretrained(folder)"
        ) from error


def _load_model(
    source: ModelSource, dtype: torch.dtype | None, remote_code: bool, options: Mapping[str, Any]
) -> Any:
    if source.gguf and (gguf := getattr(llm_module("transformers"), "GgufConfig", None)):
        # Weights that stay packed cannot be trained or saved; older versions never pack them.
        options = {"quantization_config": gguf(dequantize=True)}
    # transformers cannot turn off its progress bar for a GGUF file.
    bars = redirect_stderr(io.StringIO()) if source.gguf else nullcontext()
    with _as_user_error(source), bars:
        config = _load_config(source, remote_code)
        model, info = auto_model(config).from_pretrained(
            source.path,
            config=config,
            dtype="auto" if dtype is None else dtype,
            trust_remote_code=remote_code,  # None would ask on the terminal
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # raised below, with the tensor's name
            **source.options,
            **options,
        )
    for name, saved, expected in sorted(info["mismatched_keys"]):
        raise InputError(
            f"the weights of {source.name!r} do not match its config.json: the shape of {name} is "
            f"{tuple(saved)}, but the configuration requires {tuple(expected)}; use the "
            "config.json that was saved with the weights"
        )
    if missing := sorted(info["missing_keys"]):  # transformers fills them with random numbers
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise InputError(
            f"{len(missing)} tensors are missing from the weights of {source.name!r}: {names}; use "
            "the files of a complete causal language model"
        )
    return model


@contextmanager
def _as_user_error(source: ModelSource) -> Iterator[None]:
    """Raise an error that a user can act on for any failure to read the files of a model."""
    name = source.name
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise CausalLMUnavailable(name, error) from error
    except pickle.UnpicklingError as error:
        raise InputError(
            f"the weights of {name!r} cannot be read: {why_refused(error)}. Save them as "
            "model.safetensors with model.save_pretrained"
        ) from error
    except Exception as error:  # transformers, safetensors and gguf raise their own exceptions
        if is_out_of_memory(error) or isinstance(error, ImportError):
            raise
        if "Unrecognized configuration class" in str(error):
            kind = _load_config(source, False).model_type
            raise InputError(
                f"{name!r} is a model of type {kind!r}, not a causal language "
                "model; expected a model that AutoModelForCausalLM loads, such as GPT-2 or Llama"
            ) from error
        _check_remote_code(name, error)
        raise InputError(f"{name!r} cannot be loaded: {brief(error)}") from error


def _load_processor(source: str, remote_code: bool) -> Any:
    """Load the processor of a model of images and text; warn and return None if that fails."""
    auto = llm_module("transformers").AutoProcessor
    try:
        processor = auto.from_pretrained(source, trust_remote_code=remote_code)
    except Exception as error:  # each kind of processor raises its own exceptions
        _check_remote_code(source, error)
        message = "%s is used for text only, because its image processor cannot be loaded (%s)"
        logger.warning(message, source, error)
        return None
    return processor if hasattr(processor, "image_processor") else None  # else a tokenizer


def _check_remote_code(source: str, error: Exception) -> None:
    """Raise InputError if an error is about Python files that come with the model."""
    if "trust_remote_code" in str(error):
        raise InputError(
            f"{source!r} needs Python code from its own folder or repository, which could do "
            "anything: read the code, then allow it with TRUST_REMOTE_CODE (--trust_remote_code)"
        ) from error


def _check_quantized(source: ModelSource, quantized: bool) -> None:
    if quantized and source.gguf:
        raise InputError(
            f"QUANTIZATION is set, but {source.name} is a GGUF file, whose weights are dequantized "
            "when they are loaded: set QUANTIZATION to None, or save the model of "
            "load_causal_lm(file) with save_pretrained, and name that folder"
        )


def _check_adapters(folder: Path, base: str, quantized: bool) -> None:
    """Raise InputError for adapters that name no base model, or whose base is to be quantized."""
    if quantized:
        raise InputError(
            f"QUANTIZATION is set, but {folder} holds adapters, which cannot be merged into a "
            "base model in 4 bits: save the merged model of load_causal_lm(folder) with "
            "save_pretrained, and name that folder"
        )
    if not base:
        raise InputError(f"the adapters in {folder} name no base model: {_BASE}")


def _own_tokenizer(folder: Path, base: CausalLM, remote_code: bool) -> Any:
    """Return the tokenizer that is saved with adapters, or that of their base model."""
    if (folder / "tokenizer_config.json").is_file():
        return load_tokenizer(folder, remote_code=remote_code)
    return base.tokenizer


def _load_adapted(
    folder: Path, base: str, dtype: torch.dtype | None, remote_code: bool
) -> CausalLM:
    lm = load_causal_lm(base, remote_code=remote_code)
    peft = llm_module("peft")
    try:
        with warnings.catch_warnings():  # peft uses deprecated names of transformers
            warnings.simplefilter("ignore", FutureWarning)
            model = peft.PeftModel.from_pretrained(lm.model, folder).merge_and_unload()
            model.requires_grad_(True)  # peft froze the base
    except Exception as error:  # peft, safetensors and torch raise their own exceptions
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"the adapters in {folder} cannot be loaded on {base}: {brief(error)}"
        ) from error
    if dtype is not None:
        cast_weights(model, dtype)
    tokenizer = _own_tokenizer(folder, lm, remote_code)
    return CausalLM(model.eval(), tokenizer, str(folder), files_id(folder), lm.processor)


def _base_of_adapters(folder: Path, above: tuple[Path, ...] = ()) -> str | None:
    """Return the name of the base model of adapters: empty if missing, None without adapters."""
    config = folder / "adapter_config.json"
    if not config.is_file():
        return None
    try:
        base = json.loads(config.read_bytes()).get("base_model_name_or_path") or ""
        if not isinstance(base, str) or "\0" in base:
            raise ValueError("base_model_name_or_path is not a name")
        if folder.resolve() in above:
            raise ValueError("these adapters are their own base")
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{config} cannot be used ({brief(error)}): {_BASE}") from error
    if base:
        _base_of_adapters(Path(base).expanduser(), (*above, folder.resolve()))
    return base


def _check_causal(model: Any, name: str) -> None:
    """Raise InputError if the output at a token depends on later tokens, as in BERT."""
    ids = torch.arange(4, device=model.device).repeat(2, 1)
    ids[1, -1] += 1  # differs at the last position only
    ids %= model.get_input_embeddings().weight.shape[0]
    with evaluating(model):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    first, second = logits[:, :-1].float()
    rounding = 32 * torch.finfo(model.dtype).eps * first.abs().max()
    if (first - second).abs().max() > rounding:  # false for NaN, which other checks find
        raise InputError(
            f"{name!r} ({type(model).__name__}) is not a causal language model: its output at a "
            "token depends on the tokens that follow. Use a decoder such as GPT-2 or Llama"
        )


def _short_id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
