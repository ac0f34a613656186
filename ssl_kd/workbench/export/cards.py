"""Model and dataset cards for the Hugging Face Hub, and the folders that hold them."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData, ModelCard

from ssl_kd import __version__
from ssl_kd.files import atomic_write_json
from ssl_kd.vision.hub import MODEL, card_of_model, push_folder, usage
from ssl_kd.vision.model import DIGEST, ClusterModel
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.export.parquet_table import write_parquet
from ssl_kd.workbench.output_files import new_folder

METRICS = {"acc": "accuracy (Hungarian)", "nmi": "NMI", "ari": "ARI", "ami": "AMI"}
_NAMED = ("HEAD", "LOSS", "METHOD", "INSTANCE_WEIGHT")  # other text settings may hold paths
ANSWER = "consensus"  # the row of the run's table with the final clusters


def write_model(content: Content, out: Path) -> Path:
    """Write the files of a model repository: README.md, config.json, model.safetensors.

    Raises:
        InputError: `out` exists; FileNotFoundError: the run has no model.
    """
    return _write_model(content.samples, out, "USER/NAME")


def _write_model(samples: Samples, out: Path, repo_id: str) -> Path:
    for name in MODEL:
        if not (samples.path / name).is_file():
            raise FileNotFoundError(f"{samples.path} has no {name}: finish the run first")
    with new_folder(out) as folder:
        shutil.copyfile(samples.path / MODEL[1], folder / MODEL[1])
        atomic_write_json(folder / MODEL[0], _config(samples))
        (folder / "README.md").write_text(str(model_card(samples, repo_id)), encoding="utf-8")
    return out


def write_dataset(content: Content, out: Path) -> Path:
    """Write the files of a dataset repository: README.md and clusters.parquet.

    Raises:
        InputError: `out` exists.
    """
    with new_folder(out) as folder:
        write_parquet(content, folder / "clusters.parquet")
        (folder / "README.md").write_text(str(dataset_card(content)), encoding="utf-8")
    return out


def model_card(samples: Samples, repo_id: str = "USER/NAME") -> ModelCard:
    """Return the card of a run's model: scores, use, and what it was trained on.

    Args:
        samples: the run.
        repo_id: its repository, for the code in the card.
    """
    n_train = len(samples.splits.get("train", ()))
    subtitle = f"{samples.n_clusters} clusters of {n_train} training samples"
    use = usage(repo_id, samples.config["in_dim"], samples.metrics["teacher"]["name"])
    sections = [_scores(samples), use, _about(samples)]
    return card_of_model(samples.path.resolve().name, subtitle, sections)


def push_run(
    samples: Samples, repo_id: str, *, private: bool | None = None, token: str | None = None
) -> str:
    """Upload a run's model and its card to the Hub; return its address.

    `MultiHeadClusterer.from_pretrained(repo_id)` and `ClusterModel.from_pretrained(repo_id)` load
    it again.

    Args:
        samples: the run.
        repo_id: `user/name`; created if it does not exist.
        private: whether it is private; None: the default of the account.
        token: Hub token; None: the one stored by `hf auth login`.

    Raises:
        InputError: an invalid name; HubRefused: the Hub did not accept it.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = _write_model(samples, Path(temporary) / "model", repo_id)
        return push_folder(folder, repo_id, private=private, token=token)


def dataset_card(content: Content) -> DatasetCard:
    """Return the card of the table of clusters: columns, scores, and origin."""
    files = [{"split": "train", "path": "clusters.parquet"}]
    data = DatasetCardData(
        pretty_name=f"Clusters of {content.title}",
        tags=["clustering", "ssl_kd"],
        configs=[{"config_name": "default", "data_files": files}],
    )
    columns = ", ".join(f"`{name}`" for name in next(content.batches(1)).schema.names)
    body = f"""# Clusters of {content.title}

{len(content)} samples and the cluster of each, by ssl_kd {__version__}; the pictures
are not included. Columns: {columns}.

{_scores(content.samples)}

{_about(content.samples)}
"""
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{body}")


def _config(samples: Samples) -> dict[str, Any]:
    """Return the configuration that loading the model needs, without paths of this machine."""
    needed = {DIGEST, *inspect.signature(ClusterModel).parameters}
    config = {name: value for name, value in samples.config.items() if name in needed}
    settings = {
        name: value
        for name, value in samples.settings.items()
        if name in _NAMED or not isinstance(value, str)
    }
    return {**config, "settings": settings}


def _about(samples: Samples) -> str:
    settings = samples.settings
    return (
        f"## About\n\nData: {Path(samples.metrics['dataset']['name']).name}. Teacher: "
        f"{samples.metrics['teacher']['name']}. Method: {settings['METHOD'] or 'graph'}. Seed: "
        f"{settings['SEED']}. No label was used to find the clusters."
    )


def _scores(samples: Samples) -> str:
    """Return the scores of the final clusters as a table, where labels are known."""
    rows = [row for row in samples.metrics["table"] if row["name"] == ANSWER]
    rows = [row for row in rows if row.get("acc") is not None]
    if not rows:
        return "No labels are known, so there are no scores."
    lines = [["split", *METRICS.values()], ["---"] * (len(METRICS) + 1)]
    for row in rows:
        scores = ["" if row.get(m) is None else f"{row[m]:.4f}" for m in METRICS]
        lines.append([row["split"], *scores])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Scored against labels that were not used in training:\n\n{table}"
