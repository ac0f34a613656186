"""Format the scores of a clustering run as the commands and the report show them."""

from typing import Any

from rich.table import Table
from rich.text import Text

from ssl_kd.core.pages.tables import new_table
from ssl_kd.core.pages.wording import percent
from ssl_kd.vision.evaluate import METRICS


def extension_text(metrics: dict[str, Any]) -> str:
    """Return a sentence on how the samples that extended a run were assigned to clusters."""
    about = metrics["extended"]
    new = [f"{c['cluster']} ({c['size']:,} samples)" for c in about["new_clusters"]]
    text = f"{about['joined']:,} of {about['n']:,} new samples joined existing clusters"
    noun = "new cluster" if len(new) == 1 else "new clusters"
    in_new = sum(c["size"] for c in about["new_clusters"])
    proposal = f"{in_new:,} are proposed as {len(new)} {noun}: {', '.join(new)}"
    return f"{text}; {proposal if new else 'no new cluster is proposed'}"


def number_text(metrics: dict[str, Any]) -> str | None:
    """Return a sentence with the likely numbers of clusters; None if the number was set."""
    number = (metrics.get("graph") or {}).get("number")
    if not number:
        return None
    ranked = [level["n_clusters"] for level in number["ranked"]]
    others = ", ".join(str(k) for k in [k for k in ranked if k != number["n_clusters"]][:3])
    alternatives = f"; alternatives: {others}" if others else ""
    low, high = number["interval"]
    likely = f"{low} to {high}" if low < high else f"{low}"
    return f"Likely {likely} clusters; {number['n_clusters']} are used{alternatives}"


def other_sizes_text(metrics: dict[str, Any]) -> str | None:
    """Return a sentence on the answer with the other CLUSTER_SIZES; None if it is not known."""
    graph = metrics.get("graph") or {}
    if not (other := graph.get("other")):
        return None
    largest, *_, smallest = other["sizes"]
    was, share = graph["cluster_sizes"], percent(other["agreement"])
    return (
        f"CLUSTER_SIZES is {was}. With {other['cluster_sizes']}, {share} % of the samples would be "
        f"in the same cluster, and clusters would have {smallest:,} to {largest:,} of them"
    )


def results_table(metrics: dict[str, Any]) -> Table:
    """Return a table of the scores of a clustering run in percent, one column for each metric.

    Below the clusters are the classifiers of the embeddings, k-NN and linear probe, if they ran.
    """
    title = "Clusters against the labels, in percent" if metrics["table"] else None
    data = metrics["dataset"]
    if title and data["n_labelled"] != data["n_train"]:
        title += f" ({data['n_labelled']:,} of {data['n_train']:,} training samples are labeled)"
    # 80 columns are enough for every name; only a long note takes a second line.
    table = new_table(title, "answer")
    table.add_column("split")
    for metric in METRICS.values():
        table.add_column(metric.name, justify="right")
    table.add_column("note", overflow="fold")
    split = None
    for row in [*metrics["table"], *classifier_rows(metrics)]:
        if split not in (None, row["split"]):
            table.add_row()
        split = row["split"]
        scores = [row.get(key) for key in METRICS]
        shown = ["-" if score is None else f"{100 * score:.1f}" for score in scores]
        # Text: a name in square brackets is no markup.
        cells = [row["name"], split, *shown, row.get("note") or ""]
        style = "bold" if row["name"] == "consensus" else None
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def classifier_rows(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows with the accuracy of the classifiers that were trained on embeddings and labels.

    They are judged on held-out data if it has labels.
    """
    splits = [row["split"] for row in metrics["table"] if row.get("acc") is not None]
    probe = metrics.get("linear_probe") or {}
    scores = {
        "k-NN, trained with labels": (metrics.get("knn_accuracy"), None),
        "linear probe, trained with labels": (probe.get("accuracy"), probe.get("note")),
    }
    return [
        {"name": name, "split": splits[-1], "acc": accuracy, "note": note}
        for name, (accuracy, note) in scores.items()
        if accuracy is not None and splits
    ]
