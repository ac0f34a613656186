"""Export to Label Studio: tasks with predicted clusters, and the labeling interface."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from ssl_kd_explore.export.content import Content
from ssl_kd_explore.output_files import write_list

LOCAL = "/data/local-files/?d="


def write_label_studio(
    content: Content, folder: Path, *, url: str | None = None, skip_missing: bool = False
) -> None:
    """Write `tasks.json`, which Label Studio imports, and the interface `label_config.xml`.

    `url` serves the common folder of all pictures, as `https://example.org/photos`. None stands for
    Label Studio's local files, with `LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT` set to `/`.
    """
    content, files = content.with_pictures(skip_missing=skip_missing)
    content.write_decisions(folder)
    interface = _interface(list(content.cluster_names().values()))
    (folder / "label_config.xml").write_text(interface, encoding="utf-8")
    served = "/" if url is None else os.path.commonpath([file.parent for file in files])
    base = LOCAL if url is None else f"{url.rstrip('/')}/"
    paths = [os.fsencode(file.relative_to(served).as_posix()) for file in files]
    rows = zip(content.rows.tolist(), paths, content.records(), strict=True)
    tasks = (_task(content.title, number, base + quote(path), row) for number, path, row in rows)
    write_list(folder / "tasks.json", tasks)


def _task(run: str, number: int, image: str, row: dict[str, Any]) -> dict[str, Any]:
    choice = {
        "id": f"row{number}",
        "from_name": "cluster",
        "to_name": "image",
        "type": "choices",
        "value": {"choices": [row["cluster_name"]]},
    }
    prediction = {"score": row["confidence"], "model_version": run, "result": [choice]}
    about = {key: row[key] for key in ("split", "checked") if key in row}
    return {
        "data": {"image": image, "file": row["file"]},
        "meta": {"run": run, "row": number, **about},
        "predictions": [prediction],
    }


def _interface(choices: list[str]) -> str:
    lines = "\n".join(f"    <Choice value={quoteattr(choice)}/>" for choice in choices)
    return (
        '<View>\n  <Image name="image" value="$image"/>\n  <Choices name="cluster" toName="image" '
        f'choice="single">\n{lines}\n  </Choices>\n</View>\n'
    )
