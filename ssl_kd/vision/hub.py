"""The clusterer on the Hugging Face hub."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ssl_kd import __version__
from ssl_kd.errors import InputError, UserError

MODEL = ("config.json", "model.safetensors")


class HubRefused(UserError, RuntimeError):
    """The hub took nothing: no token, no right to write, or it cannot be reached."""


def push_saved(
    save: Callable[[Path], object],
    n_clusters: int,
    dim: int,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Put what `save` writes into a folder on the hub, with a plain card; return where it is.

    Raises:
        InputError: no such name can be; HubRefused: the hub took nothing.
    """
    with tempfile.TemporaryDirectory() as place:
        save(folder := Path(place))
        plain_card(repo_id, n_clusters, dim).save(folder / "README.md")
        return push_folder(folder, repo_id, private=private, token=token)


def folder_of(name: str | Path) -> Path:
    """A folder; of a name as `user/name`, where none is, that of the hub's model in the cache.

    Raises:
        FileNotFoundError: the hub has no such model, or cannot be reached.
    """
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        return Path(name)
    repo_id = str(name)
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(MODEL)))
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FileNotFoundError(
            f"{repo_id} is no folder here, and no model of that name came from the hub: {reason}"
        ) from error


def push_folder(
    folder: Path, repo_id: str, *, private: bool | None = None, token: str | None = None
) -> str:
    """Put a folder's files on the hub as a model, in one commit; return where it is.

    Raises:
        InputError: no such name can be; HubRefused: the hub took nothing.
    """
    refuse_name(repo_id)
    api = HfApi(token=token)
    try:
        url = api.create_repo(repo_id, exist_ok=True, private=private)
        api.upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message="Written by ssl_kd"
        )
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise HubRefused(
            f"the hub did not take {repo_id}: {reason}. Log in with `hf auth login`, or give a "
            "token that may write"
        ) from error
    return str(url)


def plain_card(repo_id: str, clusters: int, width: int) -> ModelCard:
    """Return the card of a clusterer that no run trained, so that no scores are known.

    Args:
        repo_id: where it will lie.
        clusters: how many it tells apart.
        width: of the embeddings that it takes.
    """
    parts = [usage(repo_id, width, "the model whose embeddings it was fitted on")]
    return card_of_model(repo_id.rpartition("/")[2], f"{clusters} clusters", parts)


def card_of_model(title: str, of: str, parts: list[str]) -> ModelCard:
    """Return a model card: its tags, a title, how many clusters `of` what, and more sections."""
    tags = ["clustering", "self-distillation", "image-feature-extraction"]
    data = ModelCardData(library_name="ssl_kd", tags=tags, model_name=title)
    what = (
        f"# {title}\n\nHeads that cluster the embeddings of a frozen teacher, by ssl_kd "
        f"{__version__}: {of}."
    )
    body = "\n\n".join([what, *parts])
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def usage(repo_id: str, width: int, teacher: str) -> str:
    """Return the section of a card that shows how the model is used."""
    return f"""## Use

```python
from ssl_kd import MultiHeadClusterer

clusterer = MultiHeadClusterer.from_pretrained("{repo_id}")
clusters = clusterer.predict(X)  # [n, {width}], embeddings of {teacher}
```

It takes embeddings, not images. Clusters are what the data shows; that they are what a person would
call a class is not promised."""


def refuse_name(repo_id: str) -> None:
    """Raise InputError where `repo_id` cannot be a name on the hub."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError(
            f"{repo_id!r} cannot be a name on the Hugging Face hub: expected one as user/name"
        ) from error
