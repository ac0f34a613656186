"""Export to Label Studio: tasks with predicted clusters, and the labeling interface."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.output_files import new_folder, write_list

LOCAL = "/data/local-files/?d="


def write_label_studio(
    content: Content, out: Path, *, url: str | None = None, skip_missing: bool = False
) -> Path:
    """Write `tasks.json`, which Label Studio imports, and the interface `label_config.xml`.

    `url` serves the common folder of all pictures, as `https://example.org/photos`. None stands for
    Label Studio's local files, with `LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT` set to `/`.
    """
    content, files = content.with_pictures(skip_missing=skip_missing)
    choices = [*content.cluster_names().values()]
    common = Path(os.path.commonpath([file.parent for file in files]))

    def address(file: Path) -> str:
        if url is None:
            return LOCAL + quote(os.fsencode(file).lstrip(b"/"))
        return f"{url.rstrip('/')}/{quote(os.fsencode(file.relative_to(common).as_posix()))}"

    with new_folder(out) as folder:
        content.write_decisions(folder)
        (folder / "label_config.xml").write_text(_interface(choices), encoding="utf-8")
        rows = zip(content.rows.tolist(), files, content.records(), strict=True)
        tasks = (_task(content.title, number, address(file), row) for number, file, row in rows)
        write_list(folder / "tasks.json", tasks)
    return out


def _task(run: str, number: int, image: str, row: dict[str, Any]) -> dict[str, Any]:
    choice = {
        "id": f"row{number}",
        "from_name": "cluster",
        "to_name": "image",
        "type": "choices",
        "value": {"choices": [row["cluster_name"]]},
    }
    prediction = {"score": row["confidence"], "model_version": run, "result": [choice]}
    meta = {"run": run, "row": number, "split": row["split"]}
    if "checked" in row:
        meta["checked"] = row["checked"]
    return {
        "data": {"image": image, "file": row["file"]},
        "meta": meta,
        "predictions": [prediction],
    }


def _interface(choices: list[str]) -> str:
    lines = "\n".join(f"    <Choice value={quoteattr(choice)}/>" for choice in choices)
    return (
        '<View>\n  <Image name="image" value="$image"/>\n  <Choices name="cluster" toName="image" '
        f'choice="single">\n{lines}\n  </Choices>\n</View>\n'
    )
