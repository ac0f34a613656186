"""scripts/photos.py on small packages that the tests write, and a server on this machine."""

import hashlib
import io
import shutil
import tarfile
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest
from PIL import Image

from scripts import photos
from ssl_kd.core.errors import DatasetUnreachable, InputError
from ssl_kd.vision.data import FolderDataset
from tests.local_server import LocalServer

TAKEN = {
    "animals/birds/duck.png": "birds/duck.png",
    "animals/mammals/cats/lion.png": "mammals/lion.png",
    "space/moon/moon_full.png": "planets/moon_full.png",
    "vehicles/flight/planes/747.png": "vehicles/747.png",
    "sports/soccer.png": "sports/soccer.png",
}
NOT_TAKEN = (
    "animals/birds/cartoon/penguin.png",
    "animals/birds/duck.ogg",
    "animals/birds/duck_mirror.png",
    "animals/mammals/hedgehog.png",
    "hobbies/camera.png",
    "symbols/alphabets/asl/a.png",
    "../../doc/birds.png",
)


def silent(*_):
    """Show no progress."""


def picture(color):
    content = io.BytesIO()
    Image.new("RGBA", (6, 4), color).save(content, "png")
    return content.getvalue()


def package(path, files=(*TAKEN, *NOT_TAKEN), member="data.tar.xz"):
    """Write a Debian package with pictures, all but the last of them half transparent."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for i, name in enumerate(files):
            content = picture((255, 0, 0, 128 if i else 255))
            info = tarfile.TarInfo(f"./{photos.STAMPS}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    parts = [b"!<arch>\n"]
    for name, content in (("debian-binary", b"2.0\n"), ("odd", b"one"), (member, data.getvalue())):
        parts += [
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode(),
            content,
        ]
        parts.append(b"\n" * (len(content) % 2))
    path.write_bytes(b"".join(parts))
    return path


def digest_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def deb(tmp_path):
    return package(tmp_path / "stamps.deb")


class Server(BaseHTTPRequestHandler):
    """Serves `content`; only `most` bytes of it at a time, and parts of it unless `ranges`."""

    content, most, ranges, asked = b"", 1 << 30, True, []

    def do_GET(self):
        """Answer with the content, or with its end."""
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        start = int(wanted[len("bytes=") : -1]) if wanted and self.ranges else 0
        if start >= len(self.content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        self.wfile.write(self.content[start : start + self.most])

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def server(deb, monkeypatch):
    """Serve the package; return the handler's class, whose attributes may be changed."""
    monkeypatch.setattr(photos, "BLOCK", 64)
    with LocalServer(type("OfTest", (Server,), {"content": deb.read_bytes(), "asked": []})) as it:
        monkeypatch.setattr(photos, "URL", f"{it.url}/stamps.deb")
        yield it.RequestHandlerClass


def fill(folder, deb, digest):
    return photos.prepare(folder, None, silent, url=photos.URL, digest=digest or digest_of(deb))


def test_pictures_are_sorted_into_the_classes_of_their_folders(deb, tmp_path):
    folder = tmp_path / "data" / "photos"
    done = photos.prepare(folder, deb, silent, digest=digest_of(deb))
    assert done.startswith(f"{folder}: 5 pictures of 12 classes: birds, fish, flowers")
    taken = {str(path.relative_to(folder)) for path in folder.rglob("*.png")}
    assert taken == set(TAKEN.values())
    assert deb.exists() and [path.name for path in folder.parent.iterdir()] == ["photos"]
    dataset = FolderDataset(folder, "photos", "train", labeled=True)
    assert dataset.class_names == ("birds", "mammals", "planets", "sports", "vehicles")
    shown = [np.asarray(dataset.image(i))[0, 0].tolist() for i in range(2)]
    assert shown == [[255, 0, 0], [255, 127, 127]]  # blended with white
    assert photos.prepare(folder, None, silent) == f"{folder} is there: 5 pictures"


def test_an_interrupted_download_continues_where_it_ended(deb, server, tmp_path):
    folder, part = tmp_path / "photos", tmp_path / f"{photos.PACKAGE}.part"
    server.most = 100
    with pytest.raises(DatasetUnreachable, match="ends after 100 of .* start again, or .* --deb"):
        fill(folder, deb, None)
    assert part.stat().st_size == 100 and not folder.exists()
    server.most = 1 << 30
    assert "5 pictures" in fill(folder, deb, None)
    assert server.asked == [None, "bytes=100-"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "stamps.deb"]


@pytest.mark.parametrize("begun", ["nothing", "other bytes", "everything"])
def test_a_server_without_ranges_sends_everything_again(deb, server, tmp_path, begun):
    part = tmp_path / f"{photos.PACKAGE}.part"
    if begun != "nothing":
        part.write_bytes(deb.read_bytes() if begun == "everything" else b"odd")
    server.ranges = begun == "everything"
    assert "5 pictures" in fill(tmp_path / "photos", deb, None)


def test_a_file_with_another_digest_is_removed(deb, server, tmp_path):
    with pytest.raises(DatasetUnreachable, match="has the SHA-256 .*, expected 0000.* removed"):
        fill(tmp_path / "photos", deb, "0" * 64)
    assert [path.name for path in tmp_path.iterdir()] == ["stamps.deb"]
    with pytest.raises(InputError, match="stamps.deb has the SHA-256"):
        photos.prepare(tmp_path / "photos", deb, silent)
    assert deb.exists()


def test_without_an_answer_the_error_names_the_address_and_the_way(tmp_path):
    way = "make photos DEB=FILE"
    with LocalServer(Server) as server:
        url = f"{server.url}/stamps.deb"
        with pytest.raises(DatasetUnreachable, match=f"{url} answers 416 .*{way}"):
            photos.prepare(tmp_path / "photos", None, silent, url=url)
    with pytest.raises(DatasetUnreachable, match=f"{url} cannot be downloaded .*{way}"):
        photos.prepare(tmp_path / "photos", None, silent, url=url)


def test_files_that_are_not_the_package_are_refused(deb, tmp_path):
    for name, words in (("odd", "no Debian package"), ("control.tar.xz", "holds no data.tar.xz")):
        other = package(tmp_path / "other.deb", member="control.tar.xz")
        if name == "odd":
            other.write_bytes(b"odd bytes")
        with pytest.raises(InputError, match=words):
            photos.unpack(other, tmp_path / "photos", silent)
    with pytest.raises(InputError, match="holds no pictures in usr/share/tuxpaint/stamps"):
        photos.unpack(package(tmp_path / "o.deb", NOT_TAKEN), tmp_path / "photos", silent)
    twice = package(tmp_path / "twice.deb", ("animals/fish/a.png", "animals/fish/red/a.png"))
    with pytest.raises(InputError, match="holds two pictures fish/a.png"):
        photos.unpack(twice, tmp_path / "photos", silent)
    assert not (tmp_path / "photos").exists()


def test_an_unpacking_that_was_interrupted_starts_again(deb, tmp_path):
    def stop(stage, done, total, info):
        if info["pictures"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        photos.unpack(deb, tmp_path / "photos", stop)
    assert not (tmp_path / "photos").exists()
    assert photos.unpack(deb, tmp_path / "photos", silent) == 5
    shutil.rmtree(tmp_path / "photos")
    assert [path.name for path in tmp_path.iterdir()] == ["stamps.deb"]


def test_the_script_prints_one_line_and_no_trace(script, tmp_path):
    (tmp_path / "w.deb").write_bytes(b"odd")
    code, out, err = script("photos", "here", "--deb", "w.deb")
    assert (code, out) == (2, "") and err.startswith("ssl_kd: w.deb has the SHA-256")
    (tmp_path / "here").mkdir()
    assert script("photos", "here")[:2] == (0, "here is there: 0 pictures\n")
