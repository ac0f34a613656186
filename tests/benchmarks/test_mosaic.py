import numpy as np
import pytest

from benchmarks.mosaic import TILE, cells_of, mosaic, pale
from ssl_kd.core.colors import tint


def test_samples_on_a_grid_keep_their_cells():
    y, x = np.divmod(np.arange(12), 4)
    places = np.stack([x, y], 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(12)
    assert cells_of(places[order], np.arange(12), 3, 4).tolist() == order.tolist()


def test_each_sample_has_a_cell_of_its_own_near_its_cluster():
    rng = np.random.default_rng(0)
    clusters = np.repeat([0, 1], 12)
    places = rng.normal(0, 1, (24, 2)) + 3 * clusters[:, None]
    cells = cells_of(places.astype(np.float32), clusters, 4, 7)
    assert len(set(cells.tolist())) == 24 and cells.max() < 28
    columns = cells % 7
    assert columns[clusters == 0].mean() + 2 < columns[clusters == 1].mean()


def test_a_run_is_drawn_in_the_colors_of_its_clusters(photo_run):
    drawn = mosaic(photo_run)
    with np.load(photo_run / "arrays.npz") as file:
        clusters = file["map_cluster"]
    assert drawn.width % TILE == drawn.height % TILE == 0
    corners = np.asarray(drawn)[::TILE, ::TILE].reshape(-1, 3)
    colors, counts = np.unique(corners, axis=0, return_counts=True)
    expected = {pale(tint(int(k))): int((clusters == k).sum()) for k in set(clusters.tolist())}
    if empty := len(corners) - len(clusters):
        expected[(255, 255, 255)] = empty
    assert dict(zip(map(tuple, colors.tolist()), counts.tolist(), strict=True)) == expected
    assert np.asarray(drawn).min() < 60  # the black of the digits


def test_runs_on_too_many_images_are_refused(photo_run, monkeypatch):
    monkeypatch.setattr("benchmarks.mosaic.MOST", 3)
    with pytest.raises(SystemExit, match="expected a run on at most 3 images"):
        mosaic(photo_run)
