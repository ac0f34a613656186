"""Read `.h5ad` files of AnnData (0.8 and later) with h5py.

References:
    https://anndata.readthedocs.io/en/stable/fileformat-prose.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow

from ssl_kd.core.errors import InputError, MissingPackage
from ssl_kd.vision.data.tables import PREVIEW_ROWS, Table

_PREFERRED = ("X_pca", "X_scVI")
_DRAWN = ("X_umap", "X_tsne", "X_draw_graph", "spatial")  # layouts, which are not embeddings


def open_h5ad(path: Path) -> Table:
    """Open a file; the matrices of `obsm`, and `X`, are list columns, and those of `obs` scalars.

    The names of the observations are the column `id`.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingPackage(f"{path} needs the package h5py: pip install h5py") from error
    file: Any = h5py.File(path)
    obs = file["obs"]
    if not hasattr(obs, "keys") or "__categories" in obs:
        raise InputError(f"{path} was written by anndata before 0.8: write it with a newer one")
    columns = {name: _obs_column(obs[name]) for name in obs}
    columns["id"] = columns.pop(obs.attrs["_index"])
    matrices = {k: x for k, x in file.get("obsm", {}).items() if getattr(x, "ndim", 0) == 2}
    if "X" in file:
        matrices["X"] = file["X"]
    scalars = arrow.table(columns)

    def read(name: str) -> arrow.ChunkedArray:
        if name not in matrices:
            return scalars.column(name)
        x = _dense(matrices[name])
        flat = arrow.array(np.ascontiguousarray(x).reshape(-1))
        return arrow.chunked_array([arrow.FixedSizeListArray.from_arrays(flat, x.shape[1])])

    lists = [arrow.field(name, arrow.list_(arrow.float32())) for name in matrices]
    schema = arrow.schema([*scalars.schema, *lists])
    known = [name for name in (*_PREFERRED, *matrices) if name in matrices]
    default = next((name for name in known if not name.startswith(_DRAWN)), None)
    return Table(path, path.parent, len(scalars), schema, scalars[:PREVIEW_ROWS], read, default)


def _obs_column(stored: Any) -> arrow.Array:
    """Return a column of `obs`: an array, a categorical, or values with a mask."""
    if not hasattr(stored, "keys"):
        return arrow.array(_values(stored))
    if "codes" not in stored:
        return arrow.array(_values(stored["values"]), mask=stored["mask"][:])
    codes, categories = stored["codes"][:], arrow.array(_values(stored["categories"]))
    return categories.take(arrow.array(np.maximum(codes, 0), mask=codes < 0))


def _values(stored: Any) -> np.ndarray:
    is_text = stored.dtype.kind in "OS"
    return stored.asstr(errors="backslashreplace")[:] if is_text else stored[:]


def _dense(stored: Any) -> np.ndarray:
    """Return a matrix of an `.h5ad` file as an array `[n, d]`; it may be stored as sparse."""
    if not hasattr(stored, "keys"):
        return stored[:]
    from scipy.sparse import csc_matrix, csr_matrix

    kind = csc_matrix if stored.attrs["encoding-type"] == "csc_matrix" else csr_matrix
    parts = tuple(stored[name][:] for name in ("data", "indices", "indptr"))
    return kind(parts, shape=tuple(stored.attrs["shape"])).toarray()
