"""Export to folders: one per cluster, with links to its pictures or copies of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings import nearest
from ssl_kd_explore.export.content import Content
from ssl_kd_explore.output_files import safe_name, unique_name

LINKS = {"symlink": os.symlink, "copy": shutil.copy2}


def write_folders(
    content: Content, root: Path, *, link: str = "symlink", skip_missing: bool = False
) -> None:
    """Write a folder per cluster with a link to each of its pictures, as `03 cat/0001.jpg`."""
    if link not in LINKS:
        raise InputError(f"--link is {link!r}; expected {', '.join(LINKS)}.{nearest(link, LINKS)}")
    content, files = content.with_pictures(skip_missing=skip_missing)
    content.write_decisions(root)
    names, folders = content.cluster_names(), dict[int, Path]()
    width = len(str(max(names)))
    for cluster, name in names.items():
        label = "" if name == str(cluster) else name
        folders[cluster] = root / safe_name(f"{cluster:0{width}} {label}".strip())
        folders[cluster].mkdir()
    taken: dict[int, set[str]] = {cluster: set() for cluster in folders}
    for cluster, file in zip(content.clusters[content.rows].tolist(), files, strict=True):
        name = unique_name(safe_name(file.name), taken[cluster])
        LINKS[link](file, folders[cluster] / name)
