"""Write the model and the clusters of a run as repositories of the Hugging Face Hub."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as arrow
from pyarrow import compute

from ssl_kd import __version__
from ssl_kd.core.errors import printable
from ssl_kd.core.files import atomic_write_json
from ssl_kd.core.settings.import_paths import check_installed
from ssl_kd.vision.evaluate import METRICS
from ssl_kd.vision.model import DIGEST, MODEL_FILES, ClusterModel
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions.line_format import without_person
from ssl_kd_explore.export.content import Content
from ssl_kd_explore.export.parquet_table import write_parquet

check_installed(["huggingface_hub"], "hub", "An export in formats of the Hugging Face Hub")
from huggingface_hub import DatasetCard, DatasetCardData, ModelCard, ModelCardData  # noqa: E402

logger = logging.getLogger(__name__)

_NAMED = ("HEAD", "LOSS", "METHOD", "INSTANCE_WEIGHT")  # other text settings may hold paths
TAGS = ["clustering", "self-distillation", "image-feature-extraction"]
ANSWER = "consensus"  # name of the final clusters in the run's table of scores


def write_model(content: Content, folder: Path) -> None:
    """Write the files of a model repository to a folder, including the card README.md."""
    samples = content.samples
    for name in MODEL_FILES:
        if not (samples.path / name).is_file():
            raise FileNotFoundError(
                f"{samples.path} has no {name}, so it has no model to export: finish the run first"
            )
    shutil.copyfile(samples.path / "model.safetensors", folder / "model.safetensors")
    atomic_write_json(folder / "config.json", _config(samples))
    model_card(samples).save(folder / "README.md")


def write_dataset(content: Content, folder: Path) -> None:
    """Write the files of a dataset repository: README.md, clusters.parquet and the decisions.

    Repositories are published, so the names of people who decided (`by`) are left out.
    """
    lines = [without_person(json.loads(line)) for line in content.decisions.splitlines()]
    decisions = "".join(json.dumps(line) + "\n" for line in lines)
    content = replace(content, decisions=decisions)
    with open(folder / "clusters.parquet", "wb") as file:
        write_parquet(content, file, with_root=False)
    content.write_decisions(folder)
    dataset_card(content).save(folder / "README.md")


def model_card(samples: Samples) -> ModelCard:
    """Return the card of a run's model: its scores, training data, and an example of use."""
    n_train, name = len(samples.splits.get("train", ())), samples.path.resolve().name
    data = ModelCardData(library_name="ssl_kd", tags=TAGS, model_name=name)
    body = f"""# {name}

Heads that cluster the embeddings of a frozen teacher, by ssl_kd {__version__}:
{samples.n_clusters} clusters of {n_train} training samples.

{_scores(samples)}

## Use

```python
from ssl_kd import MultiHeadClusterer

clusterer = MultiHeadClusterer.from_pretrained("USER/NAME")
clusters = clusterer.predict(X)  # embeddings [n, {samples.config["in_dim"]}] of {_teacher(samples)}
```

The model takes embeddings, not images. The clusters are groups in the data, and may differ from the
classes that a person would choose.

{_about(samples)}
"""
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")


def dataset_card(content: Content) -> DatasetCard:
    """Return the card of an exported table of clusters, with its columns, scores and origin."""
    files = [{"split": "train", "path": "clusters.parquet"}]
    data = DatasetCardData(
        pretty_name=f"Clusters of {content.title}",
        tags=["clustering", "ssl_kd"],
        configs=[{"config_name": "default", "data_files": files}],
    )
    table = content.table
    paths = [name for name in table.column_names if _has_absolute_path(table[name])]
    if paths:
        what = "the columns %s have absolute paths of this machine: remove them before you publish"
        logger.warning(what, ", ".join(map(printable, paths)))
    columns = ", ".join(f"`{name}`" for name in table.column_names)
    body = f"""# Clusters of {content.title}

{len(content)} samples and the cluster of each, by ssl_kd {__version__}; the pictures
are not included. Columns: {columns}.

{_scores(content.samples)}

{_about(content.samples)}
"""
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{body}")


def _has_absolute_path(column: arrow.ChunkedArray) -> bool:
    if not arrow.types.is_string(column.type):
        return False
    options = compute.MatchSubstringOptions(r"^(/[^/]|[A-Za-z]:\\)")
    is_path = compute.call_function("match_substring_regex", [column], options)
    return compute.call_function("any", [is_path]).as_py() or False


def _config(samples: Samples) -> dict[str, Any]:
    """Return the entries of `config.json` that loading needs, without paths of this machine."""
    needed = {DIGEST, *inspect.signature(ClusterModel).parameters}
    config = {name: value for name, value in samples.config.items() if name in needed}
    settings = {
        name: value
        for name, value in samples.settings.items()
        if name in _NAMED or not isinstance(value, str)
    }
    return {**config, "settings": settings}


def _teacher(samples: Samples) -> str:
    return samples.metrics["teacher"]["name"]


def _about(samples: Samples) -> str:
    settings = samples.settings
    return (
        f"## About\n\nData: {Path(samples.metrics['dataset']['name']).name}. Teacher: "
        f"{_teacher(samples)}. Method: {settings['METHOD']}. Seed: {settings['SEED']}. "
        "No label was used to find the clusters."
    )


def _scores(samples: Samples) -> str:
    """Return the scores of the final clusters as a Markdown table, if labels are known."""
    rows = [row for row in samples.metrics["table"] if row["name"] == ANSWER]
    rows = [row for row in rows if row.get("acc") is not None]
    if not rows:
        return "No labels are known, so there are no scores."
    names = [metric.description for metric in METRICS.values()]
    lines = [["split", *names], ["---"] * (len(METRICS) + 1)]
    for row in rows:
        scores = ["" if row.get(key) is None else f"{row[key]:.4f}" for key in METRICS]
        lines.append([row["split"], *scores])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Scored against labels that were not used in training:\n\n{table}"
