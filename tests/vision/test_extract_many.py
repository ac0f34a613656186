"""Extraction by several processes writes the bytes of one, even after kills."""

import json
import os
import re
import shlex
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from ssl_kd import cli
from ssl_kd.core.precision import Precision
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.data import ArrayDataset, FolderDataset, open_dataset
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.teachers import load_teacher
from tests.processes import ROOT, script
from tests.vision.counting import SHARD, Counting

CPU = Precision.for_device("cpu")
TEACHER = "tests.vision.counting.Counting"
TIMEOUT = 900  # seconds; far more than any of these needs


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


class Job:
    """`train.py extract` of digits, 1437 and 360, by the teacher that counts: 23 + 6 shards."""

    def __init__(self, folder):
        self.folder, self.cache = folder, folder / "cache"
        self.cache.mkdir(parents=True)
        data = open_dataset("digits", "train")
        assert isinstance(data, ArrayDataset) and data.arrays is not None
        arrays = data.arrays
        self.sums = [str(int(arrays[at : at + SHARD].sum())) for at in range(0, 1437, SHARD)]

    def command(self, *flags):
        return [
            *("train.py", "extract", "--teacher", TEACHER),
            *("--embeddings_dir", str(self.cache), "--shard_rows", str(SHARD)),
            *("--device", "cpu", *flags),
        ]

    def run(self, *flags, words=None):
        """Run the command, or other words; return exit code, stdout and the last line of stderr."""
        known = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        known |= {"COUNTING": str(self.folder), "PYTHONPATH": paths(), "OMP_NUM_THREADS": "1"}
        done = script(ROOT, *(words or self.command(*flags)), env=known)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, (done.stderr.splitlines() or [""])[-1]

    def batches(self):
        """How often each batch was computed since the last call."""
        path = self.folder / "batches"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return Counter(line.split()[1] for line in lines)

    def stored(self, split="train"):
        """The shards that are complete, and the time of each one's file."""
        for place in (self.cache / f"embeddings_{split}.partial", self.cache):
            manifest = place / f"embeddings_{split}.json"
            if manifest.exists():
                names = [entry["file"] for entry in json.loads(manifest.read_bytes())["shards"]]
                return {name: (place / name).stat().st_mtime_ns for name in names}
        return {}


def paths():
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process makes."""
    os.environ["COUNTING"] = str(tmp_path_factory.mktemp("alone"))
    folder = Path(os.environ["COUNTING"]) / "cache"
    for split in ("train", "test"):
        options = {"precision": CPU, "batch_size": SHARD, "shard_rows": SHARD}
        teacher = load_teacher(TEACHER)
        Extraction(open_dataset("digits", split), teacher, folder, split=split, **options).store()
    del os.environ["COUNTING"]
    return content(folder)


# --- a job array and torchrun ---------------------------------------------------------------------


def test_processes_of_an_array_that_run_at_once(tmp_path, alone, monkeypatch):
    """In threads of this process, some shards by three: a task started again, one thought dead."""
    monkeypatch.setenv("COUNTING", str(tmp_path))
    found = []

    def work(rank, world):
        for split in ("train", "test"):
            only = slice(rank, None, world)
            options = {"precision": CPU, "batch_size": SHARD, "shard_rows": SHARD}
            data, teacher = open_dataset("digits", split), load_teacher(TEACHER)
            job = Extraction(data, teacher, tmp_path / "c", split=split, **options)
            found.append(job.share(only))

    shares = [(0, 3), (1, 3), (2, 3), (0, 3), (1, 2)]
    threads = [threading.Thread(target=work, args=share) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(found) == 10 and sum(share.manifest is not None for share in found) >= 2
    assert content(tmp_path / "c") == alone


def test_batches_that_straddle_shards_are_those_of_one_process(tmp_path):
    """The embedding depends on its whole batch, as roundings do."""

    class Whole(Counting):
        name = "whole"

        def __init__(self):
            self.folder = tmp_path

        def embed(self, batch):
            return super().embed(batch) + batch.float().mean()

    images = np.random.default_rng(0).integers(0, 256, (50, 4, 4), dtype=np.uint8)
    data = ArrayDataset("a", "train", images, None, None)
    options = {"split": "train", "precision": CPU, "batch_size": 8, "shard_rows": 11}
    Extraction(data, Whole(), tmp_path / "one", **options).store()
    seen = []
    for rank in (2, 0, 1):
        only = slice(rank, None, 3)
        options["progress"] = lambda *progress: seen.append(progress)
        share = Extraction(data, Whole(), tmp_path / "many", **options).share(only)
        assert seen[-1][1:3] == (share.rows, share.rows)
    assert content(tmp_path / "one") == content(tmp_path / "many")


def test_unreadable_images_of_every_share_are_listed(shared_data, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(shared_data / "images" / "awkward", folder)
    data, teacher = FolderDataset(folder, "awkward", "train"), load_teacher("pixels", image_size=16)
    options = {"split": "train", "precision": CPU, "shard_rows": 5, "batch_size": 4}
    Extraction(data, teacher, tmp_path / "one", **options).store()
    shares = [
        Extraction(data, teacher, tmp_path / "many", **options).share(slice(rank, None, 4))
        for rank in range(4)
    ]
    assert [share.manifest is None for share in shares] == [True, True, True, False]
    assert len(shares[3].manifest["unreadable"]) == 6
    assert content(tmp_path / "one") == content(tmp_path / "many")


# --- the command ----------------------------------------------------------------------------------


def command(*flags):
    return cli.main(["extract", *flags])


def test_the_command_fills_both_splits_and_stops(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("--embeddings-dir", "here", "--shard_rows=700", "--runs_dir", "runs") == 0
    output = capsys.readouterr().out.splitlines()
    assert output == [
        "here/embeddings_train.json: 1437 rows of 64, float32, in 3 shards",
        "here/embeddings_test.json: 360 rows of 64, float32, in 1 shards",
    ]
    assert EmbeddingStore.open("here", "train").n == 1437 and not Path("runs").exists()
    for rank in ("1", "0"):
        flags = ("--embeddings_dir", "there", "--shard_rows", "700", "--rank", rank, "--world", "2")
        assert command(*flags) == 0
    assert content("here") == content("there")


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--rank", "1"), "--rank is 1 and --world None; expected both"),
        (("--world", "4"), "--rank is None and --world 4; expected both"),
        (("--rank", "4", "--world", "4"), "--rank is 4 and --world 4; expected both, with a rank"),
        (("--rank", "-1", "--world", "4"), "--rank is -1"),
        (("--rank", "a", "--world", "4"), "invalid int value: 'a'"),
        (("--shard_rows", "0"), "expected a whole number, at least 1, got 0"),
        (("--datset", "x"), "There is no flag --datset. Did you mean --dataset?"),
        (("--extend", "x"), "extract only fills caches"),
        (("more",), "'more' belongs to no flag"),
    ],
)
def test_invalid_arguments_are_one_line(flags, message, capsys, tmp_path):
    assert command(*flags, "--embeddings_dir", str(tmp_path)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert not list(tmp_path.iterdir())


def test_processes_do_not_choose_a_teacher_of_photographs_each(tmp_path, monkeypatch, capsys):
    """A machine with a network chooses DINOv2; here the pixels stand for it."""

    def load(name, *, dataset, **options):
        teacher = load_teacher("pixels", dataset=dataset)
        teacher.setting = "dinov2" if name == "auto" else name
        return teacher

    monkeypatch.setattr("ssl_kd.vision.run.load_teacher", load)
    flags = ("--embeddings_dir", str(tmp_path / "c"), "--shard_rows", "700", "--teacher")
    assert command(*flags, "auto", "--rank", "0", "--world", "2") == 2
    error = capsys.readouterr().err
    assert "chose 'dinov2', another one may not, but all 2 processes fill one cache" in error
    assert "start each of them with --teacher dinov2" in error and not (tmp_path / "c").exists()
    for rank in ("0", "1"):
        assert command(*flags, "dinov2", "--rank", rank, "--world", "2") == 0
    assert EmbeddingStore.open(tmp_path / "c", "train").n == 1437
    assert command(*flags, "auto") == 0  # one process alone may choose


def test_ranks_come_from_flags_or_a_launcher_not_both(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    flags = ("--embeddings_dir", str(tmp_path / "c"), "--shard_rows", "700")
    assert command(*flags, "--rank", "0", "--world", "2") == 2
    message = "The launcher sets --rank and --world (by RANK and WORLD_SIZE): leave both flags out"
    assert message in capsys.readouterr().err and not (tmp_path / "c").exists()
    assert command(*flags) == 0
    assert "has stored its 1 of 3 shards" in capsys.readouterr().out
    for launcher in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(launcher)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert command(*flags) == 0
    assert "1437 rows of 64, float32, in 3 shards" in capsys.readouterr().out


def test_ctrl_c_keeps_complete_shards_and_prints_the_command_to_resume(tmp_path, alone):
    job = Job(tmp_path)
    (tmp_path / "stopped").write_text(job.sums[4])
    code, output, last = job.run()
    assert code == 130 and output == ""
    match = re.fullmatch(
        r"ssl_kd: Stopped by SIGINT. The complete shards are kept; continue with: (.*)", last
    )
    stored = len(job.stored())
    assert match is not None and 0 < stored < 23
    (tmp_path / "stopped").unlink()
    job.batches()
    assert job.run(words=shlex.split(match[1])[1:])[0] == 0
    assert sum(job.batches().values()) == 23 + 6 - stored and content(job.cache) == alone


# --- what is stored -------------------------------------------------------------------------------

BF16 = Precision(torch.device("cpu"), torch.bfloat16, torch.float32, False, "test")
IMAGES = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)


def test_a_half_precision_teacher_is_stored_in_half_the_space(tmp_path, monkeypatch):
    monkeypatch.setenv("COUNTING", str(tmp_path))
    data = ArrayDataset("a", "train", IMAGES, None, None)
    half = Extraction(data, Counting(), tmp_path / "half", split="train", precision=BF16).store()
    full = Extraction(data, Counting(), tmp_path / "full", split="train", precision=CPU).store()
    assert half.manifest["dtype"] == half.fingerprint.dtype == "bfloat16"
    assert full.manifest["dtype"] == full.fingerprint.dtype == "float32"
    opened = torch.load(tmp_path / "half" / "embeddings_train.pt", weights_only=True)
    assert opened["embeddings"].dtype == torch.bfloat16 and half.tensor().dtype == torch.float32
    assert torch.equal(half.tensor(), full.tensor().bfloat16().float())


def test_half_precision_overflow_names_the_sample(tmp_path, monkeypatch):
    class Large(Counting):
        name = "large"

        def embed(self, batch):
            return super().embed(batch) * 1e6

    monkeypatch.setenv("COUNTING", str(tmp_path))
    data = ArrayDataset("a", "train", IMAGES, None, None)
    fp16 = Precision(torch.device("cpu"), torch.float16, torch.float32, False, "test")
    with pytest.raises(ValueError, match=r"'large' gives NaN or infinity .* 'a/train/0'.*float32"):
        Extraction(data, Large(), tmp_path / "cache", split="train", precision=fp16).store()
