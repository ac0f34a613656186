"""Cards for the Hugging Face Hub with scores and use, and the folders that they go in."""

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
from ssl_kd.workbench.export.table import write_parquet
from ssl_kd.workbench.place import new_folder

METRICS = {"acc": "accuracy (Hungarian)", "nmi": "NMI", "ari": "ARI", "ami": "AMI"}
_NAMED = ("HEAD", "LOSS", "METHOD", "INSTANCE_WEIGHT")  # the others may be paths
ANSWER = "consensus"  # the row of the run's table that is its answer


def write_model(content: Content, out: Path) -> Path:
    """Write the folder of a model's repository: README.md, config.json, model.safetensors.

    Raises:
        InputError: there is a folder; FileNotFoundError: the run has no model.
    """
    for name in MODEL:
        if not (content.samples.path / name).is_file():
            raise FileNotFoundError(f"{content.samples.path} has no {name}: finish the run")
    with new_folder(out) as folder:
        shutil.copyfile(content.samples.path / MODEL[1], folder / MODEL[1])
        atomic_write_json(folder / MODEL[0], _config(content.samples))
        text = str(model_card(content.samples))
        (folder / "README.md").write_text(text, encoding="utf-8")
    return out


def write_dataset(content: Content, out: Path) -> Path:
    """Write the folder of a data set's repository: README.md and clusters.parquet.

    Raises:
        InputError: there is a folder.
    """
    with new_folder(out) as folder:
        write_parquet(content, folder / "clusters.parquet")
        (folder / "README.md").write_text(str(dataset_card(content)), encoding="utf-8")
    return out


def model_card(samples: Samples, repo_id: str = "USER/NAME") -> ModelCard:
    """Return the card of a run's model: its scores, how to use it, and what it learned from.

    Args:
        samples: the run.
        repo_id: where it will lie, for the lines of code in it.
    """
    title, facts = samples.path.resolve().name, _facts(samples)
    of = f"{facts['clusters']} clusters of {facts['samples']} training samples"
    use = usage(repo_id, facts["width"], facts["teacher"])
    return card_of_model(title, of, [_scores(samples), use, _about(facts)])


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


def dataset_card(content: Content) -> DatasetCard:
    """Return the card of the table of clusters: its columns, scores, and where it comes from."""
    files = [{"split": "train", "path": "clusters.parquet"}]
    data = DatasetCardData(
        pretty_name=f"Clusters of {content.title}",
        tags=["clustering", "ssl_kd"],
        configs=[{"config_name": "default", "data_files": files}],
    )
    columns = ", ".join(f"`{name}`" for name in next(content.batches(1)).schema.names)
    body = f"""# Clusters of {content.title}

{len(content)} samples and the cluster of each, by ssl_kd {__version__}; the pictures
themselves are not here. Columns: {columns}.

{_scores(content.samples)}

{_about(_facts(content.samples))}
"""
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{body}")


def _config(samples: Samples) -> dict[str, Any]:
    """Return the configuration that loading the model needs, without paths of this machine."""
    taken = {DIGEST, *inspect.signature(ClusterModel).parameters}
    config = {name: value for name, value in samples.config.items() if name in taken}
    settings = {
        name: value
        for name, value in samples.settings.items()
        if name in _NAMED or not isinstance(value, str)
    }
    return {**config, "settings": settings}


def _facts(samples: Samples) -> dict[str, Any]:
    data, settings = samples.metrics["dataset"], samples.settings
    return {
        "clusters": samples.n_clusters,
        "samples": len(samples.splits.get("train", ())),
        "teacher": samples.metrics["teacher"]["name"],
        "width": samples.config["in_dim"],
        "dataset": Path(data["name"]).name,
        "seed": settings["SEED"],
        "method": settings["METHOD"] or "graph",
    }


def _about(facts: dict[str, Any]) -> str:
    return (
        f"## About\n\nData: {facts['dataset']}. Teacher: {facts['teacher']}. Method: "
        f"{facts['method']}. Seed: {facts['seed']}. No label was used to find the clusters."
    )


def _scores(samples: Samples) -> str:
    """Return the scores of the run's answer as a table, where labels are known."""
    rows = samples.metrics["table"]
    rows = [row for row in rows if row["name"] == ANSWER and row.get("acc") is not None]
    if not rows:
        return "No labels are known, so there are no scores."
    lines = [
        ["split", *METRICS.values()],
        ["---"] * (len(METRICS) + 1),
        *(
            [row["split"], *("" if row.get(m) is None else f"{row[m]:.4f}" for m in METRICS)]
            for row in rows
        ),
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Scored against labels that it never saw:\n\n{table}"
