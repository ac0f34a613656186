"""Causal language models: loaded, with or without adapters, and identified."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ssl_kd.errors import InputError, MissingPackage, UserError
from ssl_kd.files import sha256_file, why_refused
from ssl_kd.guard.memory import is_out_of_memory
from ssl_kd.teachers.dtypes import cast_weights
from ssl_kd.teachers.quantization import Quantization, keep_gradients, stacked_bytes
from ssl_kd.teachers.weights import model_files, weights_id

logger = logging.getLogger(__name__)

_ID_LENGTH = 16
_BASE = "set base_model_name_or_path in adapter_config.json to the model they were trained on"


class CausalLMUnavailable(UserError, RuntimeError):
    """A language model's files cannot be reached; one line, with the ways to go on."""

    def __init__(self, name: str, reason: object) -> None:
        why = _reason(reason, 260)
        super().__init__(
            f"language model {name!r} is not available ({why}); give the path of a folder written "
            "by save_pretrained, check the spelling of the Hub's name, or, without a network, "
            f"fetch it where there is one (hf download {name}) and copy the Hugging Face cache"
        )


@dataclass(frozen=True)
class CausalLM:
    """A causal language model with what belongs to it.

    Attributes:
        model: a transformers model whose output has `logits`.
        tokenizer: a transformers tokenizer.
        name: path or name it came from, or what it was made as.
        weights_id: identity of configuration and weights, in hexadecimal.
        processor: of a model of images and text, which prepares both; None without one.
    """

    model: Any
    tokenizer: Any
    name: str
    weights_id: str
    processor: Any = None

    @classmethod
    def of(cls, model: Any, tokenizer: Any, name: str, processor: Any = None) -> CausalLM:
        """A model that was made in memory; its identity is that of its tensors as they are now."""
        content = f"{model.config.to_json_string()}\n{weights_id(model)}"
        return cls(model, tokenizer, name, _short_id(content), processor)


def load_causal_lm(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.float32,
    remote_code: bool = False,
    quantization: Quantization | None = None,
) -> CausalLM:
    """Load a causal language model and its tokenizer, in evaluation mode on the CPU.

    A model of images and text comes with its processor, and is one of text as well.

    Each weight is read in the dtype that is asked for; there is no copy in another. A folder of
    LoRA adapters is loaded with its base in float32, merged into it, and then cast.

    Args:
        name_or_path: folder by `save_pretrained`, or a name on the Hugging Face Hub.
        dtype: of the weights (buffers such as rotary frequencies stay as the model keeps them);
            None for the one they were saved in.
        remote_code: run Python files that come with the model, where it needs them.
        quantization: of the linear layers, and on which device the model then is; None: they are of
            `dtype`, too.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: no such folder, or none that holds a model.
        CausalLMUnavailable: the Hub, or that name on it, cannot be reached.
        ValueError: not a causal language model, no tokenizer, weights damaged or missing.
    """
    name = os.fspath(name_or_path)
    transformers = llm_module("transformers")
    folder = _local(name)
    if folder is not None and (folder / "adapter_config.json").is_file():
        if quantization is not None:
            raise InputError(
                f"{folder} holds adapters, which are merged into their base as it is loaded, and a "
                "base in 4 bits takes none: save what load_causal_lm(folder) gives, and name that"
            )
        return _with_adapters(folder, dtype, remote_code)
    place = name if folder is None else str(folder)
    with quiet(transformers):
        model = _weights(transformers, place, dtype, remote_code, quantization)
        keep_gradients(model)
        if quantization is not None and (whole := stacked_bytes(model)):
            words = "%s: its experts are no linear layers: %.0f MiB of them stay as they are"
            logger.warning(words, name, whole / 2**20)
        tokenizer = load_tokenizer(place, remote_code=remote_code)
        processor = _processor(transformers, place, remote_code) if sees(model) else None
    model.eval()
    if (code := type(model).__module__).startswith("transformers_modules."):
        logger.warning("%s runs code of its own, as TRUST_REMOTE_CODE allows: %s", name, code)
    _check_causal(model, name)
    return CausalLM(model, tokenizer, name, files_id(place), processor)


def sees(model: Any) -> bool:
    """Whether a model reads images beside text."""
    return getattr(without_adapters(model).config, "vision_config", None) is not None


def auto_model(config: Any) -> Any:
    """The class of transformers that makes a model of a configuration, of text or with images."""
    transformers = llm_module("transformers")
    both = all(getattr(config, f"{part}_config", None) for part in ("vision", "text"))
    if both and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def load_tokenizer(name_or_path: str | os.PathLike[str], *, remote_code: bool = False) -> Any:
    """Load a model's tokenizer alone.

    Args:
        name_or_path: as for `load_causal_lm`.
        remote_code: run Python files that come with the model, where it needs them.

    Raises:
        ValueError: there is none that can be read.
    """
    place = os.fspath(name_or_path)
    transformers = llm_module("transformers")
    try:
        found = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=remote_code)
        if len(found) <= len(set(found.all_special_ids)):  # made up, where no file holds it
            raise ValueError("it would know special tokens alone")
        return found
    except Exception as error:  # each kind of tokenizer has exceptions of its own
        _check_own_code(place, error)
        raise InputError(
            f"{place!r} has no readable tokenizer ({_reason(error)}); put tokenizer.json and "
            "tokenizer_config.json beside its config.json: tokenizer.save_pretrained(folder)"
        ) from error


def files_id(name_or_path: str | os.PathLike[str]) -> str:
    """Identity of a model's files: SHA-256 over configuration and weights, shortened.

    Nothing is loaded, so a cache's fingerprint can be checked without its teacher in memory.

    Args:
        name_or_path: as for `load_causal_lm`.

    Raises:
        FileNotFoundError: no such folder, or none that holds a model.
        CausalLMUnavailable: the Hub, or that name on it, cannot be reached.
    """
    name = os.fspath(name_or_path)
    folder = _local(name)
    if folder is None:
        cached_file = llm_module("transformers.utils").cached_file
        try:
            folder = Path(str(cached_file(name, "config.json"))).parent
        except OSError as error:
            raise CausalLMUnavailable(name, error) from error
    files = [folder / "config.json", *sorted(folder.glob("adapter_*")), *model_files(folder)]
    parts = [f"{f.name} {sha256_file(f)}" for f in files if f.is_file()]
    if base := _base_of_adapters(folder):
        parts.append(f"base {files_id(base)}")
    return _short_id("\n".join(parts))


def tokenizer_id(tokenizer: Any) -> str:
    """Identity of a tokenizer: two with the same one give the same ids for every text.

    The padding and truncation that a fast tokenizer was last used with do not count, and neither
    does how many rows a model's embedding has beyond the vocabulary.
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
    """One more than the largest id of a tokenizer: more than its `len` where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def positions(model: Any) -> int | None:
    """How many tokens a model has positions for; None where its configuration does not say."""
    config = without_adapters(model).config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or None


def without_adapters(model: Any) -> Any:
    """The transformers model inside PEFT's wrapping (its adapters stay in place), or itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def llm_module(name: str) -> ModuleType:
    """Import a module of the language mode's extra.

    Raises:
        ImportError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage(
            f"the language mode needs {name.partition('.')[0]}, which does not load "
            f"({_reason(error)}): pip install 'ssl_kd[llm]'"
        ) from error


# --- loading --------------------------------------------------------------------------------------


def _local(name: str) -> Path | None:
    """The folder that a name means, or None for a name on the Hub."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise FileNotFoundError(
                f"{folder} has no config.json: expected a folder by save_pretrained, with "
                "config.json, model.safetensors and the tokenizer's files"
            )
        return folder
    if folder.exists() or folder.is_absolute() or name[:1] in ".~" or name.count("/") > 1:
        raise FileNotFoundError(
            f"no folder {folder}: expected one by save_pretrained, or a name on the Hugging Face "
            "Hub such as gpt2 or Qwen/Qwen2.5-0.5B"
        )
    hub = llm_module("huggingface_hub.utils")
    try:
        hub.validate_repo_id(name)
    except hub.HFValidationError as error:
        raise InputError(
            f"{name!r} is no folder, and cannot be a name on the Hugging Face Hub: expected one "
            "such as gpt2-medium or Qwen/Qwen2.5-0.5B, of letters, digits, '-', '_' and '.'"
        ) from error
    return None


def _weights(
    transformers: Any,
    place: str,
    dtype: torch.dtype | None,
    remote_code: bool,
    quantization: Quantization | None,
) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=remote_code)
        model, info = auto_model(config).from_pretrained(
            place,
            dtype="auto" if dtype is None else dtype,
            trust_remote_code=remote_code,  # None would ask on the terminal
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below, which transformers' error does not
            **({} if quantization is None else quantization.arguments()),
        )
    except OSError as error:
        raise CausalLMUnavailable(place, error) from error
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{place!r} has weights that cannot be read: {why_refused(error)}. Expected "
            "model.safetensors, as model.save_pretrained writes it"
        ) from error
    except Exception as error:  # transformers, safetensors and pickle have exceptions of their own
        if is_out_of_memory(error) or isinstance(error, ImportError):
            raise
        if "Unrecognized configuration class" in str(error):
            kind = transformers.AutoConfig.from_pretrained(place).model_type
            raise InputError(
                f"{place!r} is a model of type {kind!r}, not a causal language model: expected one "
                "that AutoModelForCausalLM loads, such as gpt2 or a Llama"
            ) from error
        _check_own_code(place, error)
        raise InputError(f"{place!r} cannot be loaded: {_reason(error)}") from error
    for name, saved, expected in sorted(info["mismatched_keys"]):
        raise InputError(
            f"{place!r} does not fit its config.json: the tensor {name} has the shape "
            f"{tuple(saved)} in the weights, and {tuple(expected)} by the configuration (its "
            "vocab_size and other sizes); take the config.json that was saved with them"
        )
    missing = sorted(info["missing_keys"])
    if missing:  # transformers fills them with random numbers
        few = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise InputError(
            f"{place!r} lacks {len(missing)} of its model's tensors: {few}; expected the files of "
            "a whole causal language model"
        )
    return model


def _processor(transformers: Any, place: str, remote_code: bool) -> Any:
    """The processor that lies beside a model of images and text; None, and a warning, without."""
    try:
        found = transformers.AutoProcessor.from_pretrained(place, trust_remote_code=remote_code)
    except Exception as error:  # each kind of processor has exceptions of its own
        _check_own_code(place, error)
        logger.warning("%s reads text alone: its processor cannot be read (%s)", place, error)
        return None
    return found if hasattr(found, "image_processor") else None  # where there is none: a tokenizer


def _check_own_code(place: str, error: Exception) -> None:
    """Raise an InputError where a model needs Python files of its own."""
    if "trust_remote_code" in str(error):
        raise InputError(
            f"{place!r} needs Python code that comes with it, and such code is not run unasked: it "
            "may do anything. Read it, then set TRUST_REMOTE_CODE (--trust_remote_code)"
        ) from error


def _with_adapters(folder: Path, dtype: torch.dtype | None, remote_code: bool) -> CausalLM:
    base = _base_of_adapters(folder)
    if not base:
        raise InputError(
            f"{folder} holds adapters that name no base model: {_BASE}, or merge them before saving"
        )
    lm = load_causal_lm(base, remote_code=remote_code)
    peft = llm_module("peft")
    try:
        with warnings.catch_warnings():  # peft asks transformers by names that are deprecated
            warnings.simplefilter("ignore", FutureWarning)
            model = peft.PeftModel.from_pretrained(lm.model, folder).merge_and_unload()
            model.requires_grad_(True)  # peft froze what it merged into
    except Exception as error:  # peft, safetensors and torch have exceptions of their own
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{folder}: its adapters do not load on {base}: {_reason(error)}"
        ) from error
    if dtype is not None:
        cast_weights(model, dtype)
    tokenizer = lm.tokenizer
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(folder, remote_code=remote_code)
    return CausalLM(model.eval(), tokenizer, str(folder), files_id(folder), lm.processor)


def _base_of_adapters(folder: Path, above: tuple[Path, ...] = ()) -> str | None:
    config = folder / "adapter_config.json"
    if not config.is_file():
        return None
    if folder.resolve() in above:
        folders = ", ".join(map(str, above))
        raise InputError(f"{folders}: adapters that are their own base: {_BASE}")
    try:
        base = json.loads(config.read_bytes()).get("base_model_name_or_path") or ""
        if not isinstance(base, str) or "\0" in base:
            raise ValueError("base_model_name_or_path is no name")
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{config} cannot be used ({_reason(error)}): {_BASE}") from error
    if base:
        _base_of_adapters(Path(base).expanduser(), (*above, folder.resolve()))
    return base


def _check_causal(model: Any, name: str) -> None:
    """Refuse a model whose answer to a token depends on a later one (BERT loads as causal LM)."""
    ids = torch.arange(4, device=model.device).repeat(2, 1)
    ids[1, -1] += 1  # differs at the last position alone
    ids %= model.get_input_embeddings().weight.shape[0]
    with evaluating(model):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    first, second = logits[:, :-1].float()
    rounding = 32 * torch.finfo(model.dtype).eps * first.abs().max()
    if (first - second).abs().max() > rounding:  # false where the weights are NaN: not judged here
        raise InputError(
            f"{name!r} ({type(model).__name__}) is not a causal language model: its answer at "
            "a token changes with the tokens that follow"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode comes back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and no load reports: what matters in them is raised."""
    logging = transformers.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _reason(error: object, width: int = 200) -> str:
    text = str(error) or type(error).__name__
    return shorten(text, width, placeholder=" …", break_on_hyphens=False)


def _short_id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_LENGTH]
