"""Export to folders: one per cluster, with links to its pictures or copies of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from ssl_kd.errors import InputError
from ssl_kd.settings import nearest
from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.output_files import UniqueNames, new_folder, safe_name

LINKS = ("symlink", "copy")


def write_folders(
    content: Content, out: Path, *, link: str = "symlink", skip_missing: bool = False
) -> Path:
    """Write a folder per cluster with a link to each of its pictures, as `OUT/03 cat/0001.jpg`."""
    if link not in LINKS:
        raise InputError(f"--link is {link!r}; expected {', '.join(LINKS)}.{nearest(link, LINKS)}")
    content, files = content.with_pictures(skip_missing=skip_missing)
    names = content.cluster_names()
    width = len(str(max(names)))
    folders = {
        c: safe_name(f"{c:0{width}} {'' if text == str(c) else text}".strip())
        for c, text in names.items()
    }
    unique = {cluster: UniqueNames() for cluster in folders}
    with new_folder(out) as root:
        content.write_decisions(root)
        for folder in folders.values():
            (root / folder).mkdir()
        for row, file in zip(content.rows.tolist(), files, strict=True):
            cluster = int(content.clusters[row])
            _put(root / folders[cluster] / unique[cluster](safe_name(file.name)), file, link)
    return out


def _put(path: Path, file: Path, link: str) -> None:
    if link == "symlink":
        path.symlink_to(file)
    else:
        shutil.copy2(file, path)
