"""A finished run on a folder of real images, shared by tests that only read it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ssl_kd.vision.report import run_samples, write_report
from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings

QUICK = {
    "n_heads": 4,
    "hidden_dim": 16,
    "batch_size": 32,
    "n_neighbors": 8,
    "max_steps": 60,
    "baselines": False,
}


def save_digits(folder: Path, split: str, wanted: slice, classes: tuple[int, ...]) -> None:
    """Save digits of scikit-learn as `folder/split/<class>/<index>.png`."""
    data = load_digits()
    images, labels = data.images, data.target  # pyright: ignore[reportAttributeAccessIssue]
    for number in range(len(labels))[wanted]:
        image, label = images[number], labels[number]
        if label in classes:
            place = folder / split / f"digit {label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15).astype(np.uint8)).save(place / f"{number:04}.png")


def photo_settings(root: Path, **changes: object) -> VisionSettings:
    """Return the settings of a quick run on the images in `root/photos`."""
    settings: dict[str, Any] = {
        **QUICK,
        "teacher": "pixels",
        "dataset": str(root / "photos"),
        "labels": "folders",
        "embeddings_dir": str(root / "embeddings"),
        "runs_dir": str(root / "runs"),
        "run_name": "photos",
    }
    return VisionSettings(**(settings | changes))


@pytest.fixture(scope="session")
def photo_run(tmp_path_factory) -> Path:
    """Return the folder of a run with report: digits 0, 1 and 4, splits `train` and `test`."""
    root = tmp_path_factory.mktemp("photo_run")
    save_digits(root / "photos", "train", slice(0, 600), (0, 1, 4))
    save_digits(root / "photos", "test", slice(600, 750), (0, 1, 4))
    done = run(photo_settings(root))
    write_report(done, samples=run_samples(done))
    return done
