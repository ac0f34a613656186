"""Download photographs of animals, plants and things into a folder, by subject.

python scripts/photos.py                 # into data/photos; needs deb.debian.org, once
python scripts/photos.py --deb FILE      # from the package, if it was downloaded elsewhere

The pictures are those of Debian's package tuxpaint-stamps-default (GPL-2, © 2002-2022 Bill
Kendrick), most of them cut out by hand. `CLASSES` names the folders of the package that are taken,
each as a class; drawings in them are left out. The list was made by looking at the pictures, before
any of them was clustered. `make photos` clusters the folder.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ssl_kd.cli.failures import guarded
from ssl_kd.cli.screen import ProgressBars, open_screen
from ssl_kd.core.errors import OK, DatasetUnreachable, InputError
from ssl_kd.core.files import sha256_file

PACKAGE = "tuxpaint-stamps-default_2022.06.04-1_all.deb"
URL = f"https://deb.debian.org/debian/pool/main/t/tuxpaint-stamps/{PACKAGE}"
SHA256 = "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34"
STAMPS = "usr/share/tuxpaint/stamps"
CLASSES = {
    "animals/birds": "birds",
    "animals/fish": "fish",
    "animals/insects": "insects",
    "animals/mammals": "mammals",
    "food/fruit": "fruit",
    "food/vegetables": "vegetables",
    "hobbies/music": "instruments",
    "household/tools": "tools",
    "plants/flowers": "flowers",
    "space/moon": "planets",
    "space/planets": "planets",
    "sports": "sports",
    "vehicles": "vehicles",
}
"""Folder of the package -> class of the pictures in it and in its subfolders."""
LEFT_OUT = {"cartoon", "toys", "plastic"}  # subfolders: drawings, and things that only look alike
DRAWN = {"0_sun", "hedgehog", "sedan_police"}  # in folders of photographs
MIRRORED = "_mirror"  # at the end of the names of pictures that another one is a mirror image of
BLOCK = 1 << 20  # bytes that are read at once
TIMEOUT = 30.0  # seconds that the server may be silent

Progress = Callable[[str, int, int, dict[str, Any]], None]


def class_of(path: str) -> str | None:
    """Return the class of a file of the package; None if it is no picture that is taken.

    >>> class_of("./usr/share/tuxpaint/stamps/animals/mammals/cats/lion.png")
    'mammals'
    """
    file = PurePosixPath(path)
    if file.suffix != ".png" or not file.is_relative_to(STAMPS):
        return None
    folder, name = file.parent.relative_to(STAMPS), file.stem.removesuffix(MIRRORED)
    if LEFT_OUT & set(folder.parts) or name in DRAWN or name != file.stem:
        return None
    near = (CLASSES.get(str(place)) for place in (folder, *folder.parents))
    return next(filter(None, near), None)


def download(url: str, file: Path, digest: str, progress: Progress) -> None:
    """Download a file; continue at the end of `file.part` if an earlier download was interrupted.

    Raises:
        DatasetUnreachable: the server cannot be reached, or its file has another SHA-256 than
            `digest`.
    """
    part = file.with_name(f"{file.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    begun = total = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={begun}-"} if begun else {})
    way = f"download {url} where you can, and add --deb FILE (make photos DEB=FILE)"
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            if answer.status != 206:  # the server sends the whole file
                begun = 0
            total = begun + int(answer.headers.get("Content-Length", 0))
            with open(part, "ab" if begun else "wb") as target:
                while block := answer.read(BLOCK):
                    target.write(block)
                    progress("download", target.tell() >> 20, total >> 20, {"unit": "MiB"})
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416 or not begun:  # 416: all bytes are there, and were not checked yet
            raise DatasetUnreachable(f"{url} answers {error.code} {error.reason}: {way}") from error
    except (OSError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        raise DatasetUnreachable(f"{url} cannot be downloaded ({reason}): {way}") from error
    if part.stat().st_size < total:
        raise DatasetUnreachable(
            f"{url} ends after {part.stat().st_size:,} of {total:,} bytes: start again, or {way}"
        )
    if (found := sha256_file(part)) != digest:
        part.unlink()
        raise DatasetUnreachable(
            f"{url} has the SHA-256 {found}, expected {digest}. The download was removed: start "
            f"again, or {way}"
        )
    part.rename(file)


def pictures(deb: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each picture that is taken from an open package.

    A Debian package is an `ar` archive: `!<arch>`, then members behind a header of 60 bytes with
    their name (16 bytes) and size (10 bytes at 48), each padded to an even number of bytes.
    """
    if deb.read(8) != b"!<arch>\n":
        raise InputError(f"{deb.name} is no Debian package: its first bytes are not '!<arch>'")
    while len(header := deb.read(60)) == 60:
        size = int(header[48:58])
        if header[:16].rstrip(b" /") == b"data.tar.xz":
            break
        deb.seek(size + size % 2, 1)
    else:
        raise InputError(f"{deb.name} holds no data.tar.xz: expected the package {PACKAGE}")
    with tarfile.open(fileobj=deb, mode="r|xz") as archive:
        for member in archive:
            if member.isfile() and class_of(member.name) is not None:
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content.read()


def unpack(deb: Path, folder: Path, progress: Progress) -> int:
    """Write the pictures of a package to `folder/CLASS/NAME.png`; return their number.

    The folder appears when it is complete.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    total = deb.stat().st_size
    n = 0
    with open(deb, "rb") as file:
        for n, (path, content) in enumerate(pictures(file), 1):
            target = partial / str(class_of(path)) / PurePosixPath(path).name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                raise InputError(f"{deb} holds two pictures {target.relative_to(partial)}")
            target.write_bytes(content)
            progress("unpack", file.tell() >> 20, total >> 20, {"pictures": n})
    if n == 0:
        raise InputError(f"{deb} holds no pictures in {STAMPS}: expected the package {PACKAGE}")
    progress("unpack", total >> 20, total >> 20, {"pictures": n})
    partial.rename(folder)
    return n


def prepare(
    folder: Path, deb: Path | None, progress: Progress, *, url: str = URL, digest: str = SHA256
) -> str:
    """Fill `folder` unless it exists, from `deb` or from a download; return what was done."""
    if folder.is_dir():
        return f"{folder} is there: {sum(1 for _ in folder.glob('*/*.png'))} pictures"
    folder.parent.mkdir(parents=True, exist_ok=True)
    if deb is None:
        file = folder.with_name(PACKAGE)
        if not file.exists():
            download(url, file, digest, progress)
    elif (found := sha256_file(deb)) != digest:
        raise InputError(f"{deb} has the SHA-256 {found}, expected {digest}, that of {url}")
    else:
        file = deb
    n = unpack(file, folder, progress)
    if deb is None:
        file.unlink()
    classes = sorted(set(CLASSES.values()))
    return f"{folder}: {n} pictures of {len(classes)} classes: {', '.join(classes)}"


def main(argv: list[str]) -> int:
    """Download and unpack the pictures; return the exit code."""
    parser = argparse.ArgumentParser(description="Download photographs by subject.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("data/photos"))
    parser.add_argument("--deb", type=Path, metavar="FILE", help=f"a copy of {URL}")
    flags = parser.parse_args(argv)
    with ProgressBars(open_screen()) as progress:
        done = prepare(flags.folder, flags.deb, progress)
    print(done)
    return OK


if __name__ == "__main__":
    command = shlex.join(["python", *sys.argv])
    sys.exit(guarded(lambda: main(sys.argv[1:]), command, kept="downloaded bytes"))
