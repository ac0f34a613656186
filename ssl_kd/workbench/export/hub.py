"""The clusterer on the Hugging Face hub."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from ssl_kd.errors import UserError
from ssl_kd.workbench.export.cards import MODEL, model_card, plain_card, refuse_name, write_model
from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.finished import Samples


class HubRefused(UserError, RuntimeError):
    """The hub took nothing: no token, no right to write, or it cannot be reached."""


def push_run(
    samples: Samples, repo_id: str, *, private: bool | None = None, token: str | None = None
) -> str:
    """Put a run's model on the hub, with its card; return where it is.

    `MultiHeadClusterer.from_pretrained(repo_id)` and `ClusterModel.from_pretrained(repo_id)` load
    it again.

    Args:
        samples: the run.
        repo_id: `user/name`; made where it is not there.
        private: whether others may not see it; None: as the account says.
        token: of the hub; None: the one that `hf auth login` kept.

    Raises:
        InputError: no such name can be; HubRefused: the hub took nothing.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(Content.of(samples), Path(place) / "model")
        card = str(model_card(samples, repo_id))
        (folder / "README.md").write_text(card, encoding="utf-8")
        return push_folder(folder, repo_id, private=private, token=token)


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
    given: dict[str, Any] = {} if private is None else {"private": private}
    try:
        url = api.create_repo(repo_id, exist_ok=True, **given)
        made = getattr(url, "repo_id", repo_id)
        api.upload_folder(repo_id=made, folder_path=folder, commit_message="Written by ssl_kd")
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise HubRefused(
            f"the hub did not take {repo_id}: {reason}. Log in with `hf auth login`, or give a "
            "token that may write"
        ) from error
    return str(url)
