"""Label Studio: tasks with the clusters as predictions, and the labelling interface for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.place import new_folder, write_list

LOCAL = "/data/local-files/?d="


def write_label_studio(
    content: Content, out: Path, *, url: str | None = None, skip_missing: bool = False
) -> Path:
    """`tasks.json`, to import, and `label_config.xml`, the interface; a choice for each cluster.

    Args:
        content: what goes out.
        out: a folder that is not there.
        url: where the pictures' common folder is served, as `https://example.org/photos`; None:
            Label Studio's local files, with `LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT` at `/`.
        skip_missing: leave out pictures that are gone.

    Raises:
        InputError: there is a folder, or pictures are gone.
    """
    content, files = content.with_pictures(skip_missing=skip_missing)
    choices = [text for c, text in content.cluster_names().items() if c >= 0]
    common = Path(os.path.commonpath([file.parent for file in files]))
    with new_folder(out) as folder:
        (folder / "label_config.xml").write_text(_interface(choices), encoding="utf-8")
        rows = zip(content.rows.tolist(), files, content.records(), strict=True)
        tasks = (_task(content, row, number, file, common, url) for number, file, row in rows)
        write_list(folder / "tasks.json", tasks)
    return out


def _task(
    content: Content, row: dict[str, Any], number: int, file: Path, common: Path, url: str | None
) -> dict[str, Any]:
    if url is None:
        image = LOCAL + quote(os.fsencode(file).lstrip(b"/"))
    else:
        image = f"{url.rstrip('/')}/{quote(os.fsencode(file.relative_to(common).as_posix()))}"
    task: dict[str, Any] = {
        "data": {"image": image, "file": row["file"]},
        "meta": {"run": content.title, "row": number, "split": row["split"]},
    }
    if row["cluster"] >= 0:
        chosen = {
            "id": f"row{number}",
            "from_name": "cluster",
            "to_name": "image",
            "type": "choices",
            "value": {"choices": [row["cluster_name"]]},
        }
        score = {"score": row["confidence"], "model_version": content.title}
        task["predictions"] = [{**score, "result": [chosen]}]
    return task


def _interface(choices: list[str]) -> str:
    lines = "\n".join(f"    <Choice value={quoteattr(choice)}/>" for choice in choices)
    return (
        '<View>\n  <Image name="image" value="$image"/>\n  <Choices name="cluster" toName="image" '
        f'choice="single">\n{lines}\n  </Choices>\n</View>\n'
    )
