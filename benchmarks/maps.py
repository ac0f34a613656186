"""Maps of all samples: how true each way is to the neighbours, and how long it takes.

    python -m benchmarks.maps                                  # digits
    python -m benchmarks.maps --data_dir data                  # and 10,000 of Fashion-MNIST
    python -m benchmarks.maps --rows 1000000 --only landmarks  # time and memory on random rows

Ways: t-SNE of everything (scikit-learn), ours (t-SNE of landmarks, the others among them), and,
where they are installed, openTSNE and umap-learn. Trustworthiness is scikit-learn's, of 10
neighbours; the share of a row's 10 nearest neighbours on the map that share its label is beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.manifold import trustworthiness
from sklearn.neighbors import NearestNeighbors

from ssl_kd.datasets import DatasetUnavailable, ImageDataset, open_dataset
from ssl_kd.evaluate.layout import embedding_map
from ssl_kd.evaluate.sample import random_rows
from ssl_kd.explore import places

Way = Callable[[NDArray[np.float32]], NDArray]


def landmarks(most: int) -> Way:
    def way(x: NDArray[np.float32]) -> NDArray:
        rows, all_ = random_rows(len(x), most, 0), torch.from_numpy(x)

        def blocks() -> Iterable[tuple[int, torch.Tensor]]:
            for start in range(0, len(x), places.BLOCK):
                yield start, all_[start : start + places.BLOCK]

        return places.lay_out(blocks, all_[rows], rows, len(x))

    return way


def whole(x: NDArray[np.float32]) -> NDArray:
    return embedding_map(x, max_points=len(x))[1]


def opentsne(x: NDArray[np.float32]) -> NDArray:
    from openTSNE import TSNE  # pyright: ignore[reportMissingImports]

    return np.asarray(TSNE(n_jobs=torch.get_num_threads(), random_state=0).fit(x))


def umap(x: NDArray[np.float32]) -> NDArray:
    from umap import UMAP  # pyright: ignore[reportMissingImports]

    return UMAP(random_state=0, n_jobs=1).fit_transform(x)


def judged(x: NDArray, labels: NDArray, found: NDArray) -> str:
    near = NearestNeighbors(n_neighbors=11).fit(found).kneighbors(found, return_distance=False)
    same = (labels[near[:, 1:]] == labels[:, None]).mean()
    return f"{trustworthiness(x, found, n_neighbors=10):15.3f}{same:12.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_dir", type=Path)
    parser.add_argument("--rows", type=int, help="of random data, only for time and memory")
    parser.add_argument("--only", help="this way alone")
    args = parser.parse_args()
    ways: dict[str, Way] = {
        f"landmarks {m}": landmarks(m) for m in (500, 1000, 2500, places.LANDMARKS)
    }
    ways |= {"t-SNE of all": whole}
    for module, way in (("openTSNE", opentsne), ("umap", umap)):
        if importlib.util.find_spec(module):
            ways[module] = way
    digits = load_digits()
    data, target = digits.data, digits.target  # pyright: ignore[reportAttributeAccessIssue]
    sets = {"digits": (data.astype(np.float32), target)}
    if args.rows:
        centres = np.random.default_rng(0).standard_normal((50, 64), np.float32)
        x = np.random.default_rng(1).standard_normal((args.rows, 64), np.float32)
        x += 2 * centres[np.arange(args.rows) % 50]
        sets, ways = {"random": (x, None)}, {f"landmarks {places.LANDMARKS}": landmarks(5000)}
    elif args.data_dir is not None:
        try:
            fashion = open_dataset("fashion_mnist", "train", root=args.data_dir)
        except DatasetUnavailable as error:
            raise SystemExit(str(error)) from error
        assert isinstance(fashion, ImageDataset)
        pixels = np.stack([np.asarray(fashion.image(i), np.float32) for i in range(10_000)])
        rows = PCA(64, random_state=0).fit_transform(pixels.reshape(10_000, -1))
        sets["Fashion-MNIST"] = (rows, np.asarray(fashion.labels)[:10_000])
    print(f"{'':36}{'trustworthiness':>15}{'same label':>12}{'seconds':>10}{'GiB':>7}")
    for name, (x, labels) in sets.items():
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        for way, lay in ways.items():
            if args.only and args.only not in way:
                continue
            started = time.perf_counter()
            found = lay(x)
            seconds = time.perf_counter() - started
            said = judged(x, labels, found) if labels is not None else " " * 27
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"{name + ', ' + way:<36}{said}{seconds:10.1f}{peak:7.1f}", flush=True)


if __name__ == "__main__":
    main()
