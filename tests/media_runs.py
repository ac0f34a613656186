"""Finished runs on texts and on sounds, shared by tests that only read them."""

import csv
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from ssl_kd.teachers import Teacher
from ssl_kd.vision.report import run_samples, write_report
from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings
from tests.photos import QUICK
from tests.tiny_encoders import tone

TOPICS = {
    "cooking": "soup oven butter onion garlic recipe",
    "sailing": "anchor sail harbor wind rudder captain",
    "space": "orbit comet rocket moon telescope galaxy",
}
HOSTILE = '<script>alert("x")</script> & <b>soup</b>'
N_TEXTS, N_SOUNDS = 90, 48
RATE = 24_000


class WordCounts(Teacher):
    """Embed a text as the counts of its words, hashed to 64 numbers."""

    kind = "text"
    dim, transform_id = 64, "hashed words"

    def preprocess(self, image):
        codes = [zlib.crc32(word.encode()) % self.dim for word in image.lower().split()]
        return torch.tensor(codes)

    def embed(self, batch):
        counts = [torch.bincount(codes, minlength=self.dim) for codes in batch]
        return torch.stack(counts).float().to(self.device)


class Spectrum(Teacher):
    """Embed a sound as the strength of 32 bands of its spectrum."""

    kind = "audio"
    dim, transform_id = 32, "spectrum"

    def preprocess(self, image):
        return torch.from_numpy(image.samples)

    def embed(self, batch):
        spectra = [torch.fft.rfft(samples).abs()[: len(samples) // 4] for samples in batch]
        bands = [torch.stack([band.sum() for band in s.tensor_split(self.dim)]) for s in spectra]
        return torch.stack(bands).log1p().to(self.device)


def sentence(topic, generator):
    """Return a text of ten words: five of its topic among five that all topics share."""
    words = generator.choice(TOPICS[topic].split(), 5).tolist()
    return " ".join(f"the {word} and" for word in words)


def media_settings(root: Path, **changes) -> VisionSettings:
    folders = {"embeddings_dir": str(root / "embeddings"), "runs_dir": str(root / "runs")}
    return VisionSettings(**{**QUICK, **folders, "n_clusters": 3, "run_name": "a", **changes})


def finished(settings) -> Path:
    done = run(settings)
    write_report(done, samples=run_samples(done))
    return done


@pytest.fixture(scope="session")
def text_run(tmp_path_factory) -> Path:
    """Return the folder of a run with report: 90 texts in the column `body`, of three topics."""
    root = tmp_path_factory.mktemp("text_run")
    generator = np.random.default_rng(0)
    topics = [list(TOPICS)[i % 3] for i in range(N_TEXTS)]
    texts = [sentence(topic, generator) for topic in topics]
    texts[0] = f"{texts[0]} {HOSTILE}"
    with open(root / "texts.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["body", "topic"], *zip(texts, topics, strict=True)])
    table = {"dataset": str(root / "texts.csv"), "column": "body", "label_column": "topic"}
    return finished(media_settings(root, teacher="tests.media_runs.WordCounts", **table))


@pytest.fixture(scope="session")
def sound_run(tmp_path_factory) -> Path:
    """Return the folder of a run with report: 48 tones of 4 seconds in folders by their pitch."""
    root = tmp_path_factory.mktemp("sound_run")
    for i in range(N_SOUNDS):
        hertz = (300, 1200, 4000)[i % 3]
        place = root / "tones" / f"{hertz} Hz"
        place.mkdir(parents=True, exist_ok=True)
        samples = tone(hertz * (1 + 0.002 * i), 4, RATE, seed=i)
        wavfile.write(place / f"{i:02}.wav", RATE, np.round(32767 * samples).astype(np.int16))
    data = {"dataset": str(root / "tones"), "labels": "folders"}
    return finished(media_settings(root, teacher="tests.media_runs.Spectrum", **data))
