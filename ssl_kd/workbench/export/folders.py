"""Folders: one for each cluster, with links to its pictures, or copies."""

from __future__ import annotations

import errno
import filecmp
import hashlib
import json
import os
import shutil
from pathlib import Path

from ssl_kd.errors import InputError
from ssl_kd.files import atomic_write_json
from ssl_kd.settings import nearest
from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.export.place import Distinct, safe_name

LINKS = ("symlink", "hardlink", "copy")
MARK = ".ssl_kd_folders.json"


def write_folders(
    content: Content, out: Path, *, link: str = "symlink", skip_missing: bool = False
) -> Path:
    """`OUT/03 cat/0001.jpg`: a link to each picture, in the folder of its cluster.

    Nothing is ever overwritten. Started again after it was interrupted, it goes on.

    Args:
        content: what goes out.
        out: a folder that is not there, is empty, or that the same export began.
        link: `symlink`, `hardlink` (on the same disk) or `copy`.
        skip_missing: leave out pictures that are gone.

    Raises:
        InputError: another kind of link; a folder of something else; a file of another content in
            the way; pictures that are gone; hard links across disks.
    """
    if link not in LINKS:
        raise InputError(f"--link is {link!r}, not {', '.join(LINKS)}.{nearest(link, LINKS)}")
    content, files = content.with_pictures(skip_missing=skip_missing)
    _begin(content, out, link)
    names = content.cluster_names()
    width = len(str(max(names)))
    folders = {
        c: safe_name("none" if c < 0 else f"{c:0{width}} {'' if text == str(c) else text}".strip())
        for c, text in names.items()
    }
    free = {cluster: Distinct() for cluster in folders}
    for folder in folders.values():
        (out / folder).mkdir(exist_ok=True)
    for row, file in zip(content.rows.tolist(), files, strict=True):
        cluster = int(content.clusters[row])
        place = out / folders[cluster] / free[cluster](safe_name(file.name))
        if not _is_there(place, file, link):
            _put(place, file, link)
    return out


def _begin(content: Content, out: Path, link: str) -> None:
    chosen = hashlib.sha256(content.rows.tobytes())
    chosen.update(content.clusters[content.rows].tobytes())
    chosen.update(json.dumps(content.cluster_names()).encode())
    mark = {"run": str(content.samples.path.resolve()), "link": link, "chosen": chosen.hexdigest()}
    path = out / MARK
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        try:
            began = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            began = None
        if began != mark:
            raise InputError(
                f"{out} exists, and is not this export begun before: name another place with --out"
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    atomic_write_json(path, mark)


def _is_there(place: Path, file: Path, link: str) -> bool:
    """Whether it was put there before; a name that something else has is refused."""
    if not os.path.lexists(place):
        return False
    if link == "symlink":
        same = place.is_symlink() and os.readlink(place) == str(file)
    elif link == "hardlink":
        same = place.exists() and place.samefile(file)
    else:
        same = place.is_file() and filecmp.cmp(place, file, shallow=False)
    if not same:
        raise InputError(f"{place} is in the way: it is not {file}. Move it away")
    return True


def _put(place: Path, file: Path, link: str) -> None:
    if link == "symlink":
        place.symlink_to(file)
    elif link == "hardlink":
        try:
            os.link(file.resolve(), place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise InputError(
                f"{file} lies on another disk than {place}: use --link symlink or copy"
            ) from error
    else:
        temporary = place.with_name(f".{hashlib.sha256(place.name.encode()).hexdigest()[:16]}.tmp")
        try:
            shutil.copy2(file, temporary)
            os.replace(temporary, place)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
