"""Upload a saved student to the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ssl_kd.core.errors import InputError
from ssl_kd.language.models.card import without_folders
from ssl_kd.language.models.causal import llm_module
from ssl_kd.language.teachers.text_teacher import RECORD

_SUFFIXES = {".jinja", ".json", ".model", ".py", ".safetensors", ".txt"}  # of a saved model
_NAME = r'(?m)(?<=^# )student$|(?<=^- name: )student$|(?<=from_pretrained\(")student(?="\))'


def files_of(folder: Path, name: str) -> dict[str, Path | bytes]:
    """Return the files of a saved student, with a card for the repository `name`."""
    adapters = folder / "adapter_config.json"
    base = json.loads(adapters.read_bytes())["base_model_name_or_path"] if adapters.exists() else ""
    if without_folders(base) != base:
        raise InputError(
            f"{folder} has adapters on {base}, a folder that only this machine has: upload the"
            " merged model by DistilledRun(RUN).student.push_to_hub(NAME, private=True)"
        )
    card = re.sub(_NAME, name, (folder / "README.md").read_text(encoding="utf-8"))
    files: dict[str, Path | bytes] = {
        path.name: path for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES
    }
    if RECORD in files:
        weights, _, teacher = (folder / RECORD).read_text(encoding="utf-8").strip().partition(" ")
        files[RECORD] = f"{weights} {without_folders(teacher)}\n".encode()
    return {**files, "README.md": card.encode()}


def upload(files: dict[str, Path | bytes], name: str, *, private: bool) -> str:
    """Create a repository, or check that it can be written, and add the files in one commit."""
    hub = llm_module("huggingface_hub")
    api, added = hub.HfApi(), [hub.CommitOperationAdd(path, file) for path, file in files.items()]
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.auth_check(repository.repo_id, write=True)  # one that exists may be someone else's
        if private and not api.model_info(repository.repo_id).private:
            raise PermissionError("it is public; --hub_private_repo False publishes the student")
        if added:
            api.create_commit(repository.repo_id, added, commit_message="Upload the student")
    except Exception as error:  # the Hub, the network and the client have their own exceptions
        raise InputError(
            f"the repository {name!r} on the Hugging Face Hub cannot be used: {error}. Expected a"
            " token that may write: set HF_TOKEN. DistilledRun(RUN).push_to_hub(NAME) tries again"
        ) from error
    return str(repository)
