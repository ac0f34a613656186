"""Load models from the Hugging Face hub, and upload them with a card."""

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
    """The hub refused an upload: no token, no write access, or no connection."""


def push_saved(
    save: Callable[[Path], object],
    n_clusters: int,
    dim: int,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Upload the folder that `save` writes, with a plain card, and return its URL.

    Raises:
        InputError: `repo_id` is not a valid name; HubRefused: the hub refused the upload.
    """
    with tempfile.TemporaryDirectory() as place:
        save(folder := Path(place))
        clusters = f"{n_clusters} clusters"
        use = usage(repo_id, dim, "the teacher that it was trained with")
        card = card_of_model(repo_id.rpartition("/")[2], clusters, [use])
        card.save(folder / "README.md")
        return push_folder(folder, repo_id, private=private, token=token)


def folder_of(name: str | Path) -> Path:
    """Return a folder; where `user/name` is not one, download the hub's model of that name.

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
            f"there is no folder {repo_id}, and the hub has no model of that name: {reason}"
        ) from error


def push_folder(
    folder: Path, repo_id: str, *, private: bool | None = None, token: str | None = None
) -> str:
    """Upload a folder's files as a model, in one commit, and return its URL.

    Raises:
        InputError: `repo_id` is not a valid name; HubRefused: the hub refused the upload.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError(
            f"{repo_id!r} cannot be a name on the Hugging Face hub: expected one as user/name"
        ) from error
    api = HfApi(token=token)
    try:
        url = api.create_repo(repo_id, exist_ok=True, private=private)
        api.upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message="Written by ssl_kd"
        )
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise HubRefused(
            f"the hub refused {repo_id}: {reason}. Log in with `hf auth login`, or give a token "
            "with write access"
        ) from error
    return str(url)


def card_of_model(title: str, of: str, parts: list[str]) -> ModelCard:
    """Return a model card: tags, a title, a line that says what `of`, and more sections."""
    tags = ["clustering", "self-distillation", "image-feature-extraction"]
    data = ModelCardData(library_name="ssl_kd", tags=tags, model_name=title)
    what = (
        f"# {title}\n\nHeads that cluster the embeddings of a frozen teacher, by ssl_kd "
        f"{__version__}: {of}."
    )
    body = "\n\n".join([what, *parts])
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def usage(repo_id: str, width: int, teacher: str) -> str:
    """Return the section of a card with an example of use."""
    return f"""## Use

```python
from ssl_kd import MultiHeadClusterer

clusterer = MultiHeadClusterer.from_pretrained("{repo_id}")
clusters = clusterer.predict(X)  # [n, {width}], embeddings of {teacher}
```

It takes embeddings, not images. Clusters are what the data shows; that they are what a person would
call a class is not promised."""
