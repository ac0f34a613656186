"""TOKEN patches: a table of the patches of images, which a run clusters as it does any features."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

pytest.importorskip("transformers")
pytest.importorskip("torchvision")
pytest.importorskip("pandas")

import transformers  # noqa: E402

from ssl_kd import Run, cli  # noqa: E402
from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.core.precision import Precision  # noqa: E402
from ssl_kd.vision.data import open_dataset  # noqa: E402
from ssl_kd.vision.patches import PatchExtraction  # noqa: E402
from ssl_kd.vision.teachers import load_teacher  # noqa: E402
from tests.documents import ROOT, blocks  # noqa: E402

N, SIDE, PATCH = 7, 32, 8  # images, and pixels; so a grid of 4 x 4
GRID = SIDE // PATCH


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The name of a vision transformer with random weights."""
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=SIDE, patch_size=PATCH, initializer_range=0.1,
    )  # fmt: skip
    transformers.ViTModel(config).save_pretrained(folder)
    processor = transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE})
    processor.save_pretrained(folder)
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images of two textures, the second one to the right of a border that differs by image."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(N):
        pixels = rng.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
        pixels[:, border(i) * PATCH :] += np.array([190, 120, 0], dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


def border(i):
    """The first column of patches with the second texture, in image `i`."""
    return 1 + i % 3


def extract(photos, teacher, folder, *flags):
    given = ("--dataset", str(photos), "--teacher", teacher, "--token", "patches", "--shard_rows=3")
    return cli.main(["extract", *given, "--embeddings_dir", str(folder), "--device=cpu", *flags])


def rows_of(folder):
    return parquet.read_table(sorted(folder.glob("*.parquet")))


def test_every_patch_of_every_image_has_a_row_with_its_token(photos, teacher, tmp_path, capsys):
    assert extract(photos, teacher, tmp_path) == 0
    first = tmp_path / "train-00000-of-00003.parquet"
    assert capsys.readouterr().out == (
        f"{first}: {N * GRID**2} patches of 32, 4 x 4 of each image, in 3 files; cluster them with "
        f"--dataset {tmp_path}\n"
    )
    rows = rows_of(tmp_path)
    model = transformers.ViTModel.from_pretrained(teacher.removeprefix("hf:")).eval()
    pixels = np.stack([np.array(Image.open(photos / f"{i}.png")) for i in range(N)])
    with torch.no_grad():
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        tokens = model(pixel_values=x).last_hidden_state[:, 1:].flatten(0, 1)
    found = torch.from_numpy(np.stack(rows["features"].to_numpy()))
    torch.testing.assert_close(found, tokens, rtol=1e-4, atol=1e-5)
    places = [(f"{i}.png", y, x) for i in range(N) for y in range(GRID) for x in range(GRID)]
    names = ("image", "patch_row", "patch_column")
    assert list(zip(*(rows[n].to_pylist() for n in names), strict=True)) == places
    assert rows["id"].to_pylist() == [f"{name}#{y},{x}" for name, y, x in places]


def test_clusters_of_patches_are_masks_of_the_images(photos, teacher, tmp_path):
    assert extract(photos, teacher, tmp_path / "patches") == 0
    flags = {"dataset": tmp_path / "patches", "n_clusters": 2, "n_heads": 2, "epochs": 2}
    flags |= {"batch_size": 32, "runs_dir": tmp_path / "runs", "run_name": "a", "device": "cpu"}
    flags |= {"embeddings_dir": tmp_path / "embeddings", "n_neighbors": 5}
    assert cli.train([f"--{name}={value}" for name, value in flags.items()]) == 0
    run, names = Run.open(tmp_path / "runs" / "a"), {}
    (code,) = (b.body for b in blocks(ROOT / "docs" / "images.md", "python") if "masks" in b.body)
    exec(code, names)
    masks = names["masks"](run)
    expected = np.arange(GRID) >= np.array([[border(i)] for i in range(N)])
    clusters = np.stack([masks[f"{i}.png"] for i in range(N)])
    same = clusters == expected[:, None]
    assert same.all() or not same.any()  # clusters have no order
    assert run.clusters[0].images(1)[0].size == (SIDE, SIDE)  # the image of a patch is shown


def test_an_extraction_continues_with_the_missing_files(photos, teacher, tmp_path, monkeypatch):
    assert extract(photos, teacher, tmp_path / "one") == 0
    expected = rows_of(tmp_path / "one")
    many = tmp_path / "many"
    assert extract(photos, teacher, many, "--rank=1", "--world=2") == 0
    assert [file.name for file in many.iterdir()] == ["train-00001-of-00003.parquet"]
    stored = (many / "train-00001-of-00003.parquet").stat().st_mtime_ns
    assert extract(photos, teacher, many) == 0
    assert rows_of(many).equals(expected)
    assert (many / "train-00001-of-00003.parquet").stat().st_mtime_ns == stored
    monkeypatch.setattr(PatchExtraction, "loaded", None)  # nothing is embedded again
    assert extract(photos, teacher, many) == 0


def test_files_of_something_else_and_damaged_ones_are_refused(photos, teacher, tmp_path, capsys):
    assert extract(photos, teacher, tmp_path) == 0
    assert extract(photos, teacher, tmp_path, "--image_size=16") == 2
    assert "was computed from something else: transform: cache has" in capsys.readouterr().err
    assert extract(photos, teacher, tmp_path, "--shard_rows=4") == 2
    assert "another number of files than 2" in capsys.readouterr().err
    file, expected = tmp_path / "train-00002-of-00003.parquet", rows_of(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    assert extract(photos, teacher, tmp_path) != 0
    assert "is damaged" in (error := capsys.readouterr().err) and "--rebuild_damaged" in error
    assert extract(photos, teacher, tmp_path, "--rebuild_damaged") == 0
    assert rows_of(tmp_path).equals(expected)


def test_unreadable_images_have_no_rows(photos, teacher, tmp_path, caplog):
    copy = tmp_path / "photos"
    copy.mkdir()
    for i in range(N):
        (copy / f"{i}.png").write_bytes((photos / f"{i}.png").read_bytes()[: None if i % 2 else 40])
    assert extract(copy, teacher, tmp_path / "patches") == 0
    assert set(rows_of(tmp_path / "patches")["image"].to_pylist()) == {"1.png", "3.png", "5.png"}
    assert caplog.text.count("unreadable image left out") == 4


def test_a_run_does_not_embed_patches_itself(photos, teacher, tmp_path, capsys):
    flags = ("--dataset", str(photos), "--teacher", teacher, "--token", "patches", "--device=cpu")
    assert cli.train([*flags, "--runs_dir", str(tmp_path), "--embeddings_dir", str(tmp_path)]) == 2
    assert "train.py extract --token patches" in capsys.readouterr().err


def test_a_teacher_without_patches_is_refused(photos):
    data, pixels = open_dataset(str(photos), "train"), load_teacher("pixels")
    options = {"split": "train", "precision": Precision.for_device("cpu")}
    with pytest.raises(InputError, match="TOKEN is 'patches', but TEACHER 'pixels' has no patch"):
        PatchExtraction(data, pixels, "unused", **options)
    with pytest.raises(InputError, match=re.escape("torchvision:resnet18 has no patch tokens")):
        load_teacher("torchvision:resnet18", token="patches")


@pytest.mark.parametrize(("shape", "n", "grid"), [((32, 64), 32, (4, 8)), ((28, 28), 4, (2, 2))])
def test_the_grid_has_the_shape_of_the_input(shape, n, grid):
    from ssl_kd.vision.teachers.network import _grid

    assert _grid(n, shape) == grid
    with pytest.raises(InputError, match=f"returns {n + 1} patch tokens"):
        _grid(n + 1, shape)
