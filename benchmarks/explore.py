"""Measure the explorer with many samples: seconds until points show, memory and frame rate.

    python -m benchmarks.explore FOLDER --rows 1000000     # FOLDER keeps the synthetic run
    python -m benchmarks.explore FOLDER --screenshots RUN docs

Needs playwright and a Chromium. Each visit uses a fresh browser with the same flags; medians are
printed. Browser memory is the PSS of all its processes minus that with an empty page; server memory
is its peak; js is the page's heap plus typed arrays, table_js the same with the table open. The
frame rate is measured while the map is dragged, filter_s from the entry of a filter until the
table shows its rows. Without a graphics card Chromium renders on the CPU, so other load there slows
it down.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import torch
from PIL import Image
from pyarrow import csv, parquet

from benchmarks.turns import memory
from ssl_kd.core.shards import Fingerprint
from ssl_kd.vision.assignments import CSV_ROWS
from ssl_kd.vision.cache import EmbeddingStore, EmbeddingWriter
from tests.explore.explore.chromium import launch, until

FRAMES = """(seconds) => new Promise((done) => { let frames = 0; const start = performance.now();
  const count = () => { frames++; const past = (performance.now() - start) / 1000;
    past < seconds ? requestAnimationFrame(count) : done(frames / past); };
  requestAnimationFrame(count); })"""
DRAWN = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {
  const gl = explore.plot.map.get("regl")._gl;
  gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4)); done(); })))"""
# Milliseconds from the entry to the picture after the cells of the table have changed.
FILTERED = """() => { let typed;
  addEventListener("input", () => { typed = performance.now(); }, true);
  new MutationObserver((_, observer) => { observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => {
      globalThis.filtered = performance.now() - typed; }));
  }).observe(document.querySelector("#table tbody"),
    { childList: true, characterData: true, subtree: true }); }"""
ROUNDS = 3
LIMIT = 600  # seconds, of any one wait
BLOCK, DIM, COARSE, FINE = 50_000, 32, 20, 200


def made_run(folder: Path, rows: int) -> Path:
    """Write a finished run of synthetic groups unless it exists; return its folder.

    It looks like a run of `python train.py` on a features file: embeddings, configuration and
    assignments, with a cluster tree of two levels. Only the heads are missing.
    """
    run = folder / f"run_{rows}"
    if (run / "metrics.json").is_file():
        return run
    run.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    centers = 2 * random.standard_normal((COARSE, DIM))
    centers = centers.repeat(FINE // COARSE, 0) + random.standard_normal((FINE, DIM))
    clusters = random.integers(0, FINE, rows)
    ids = [f"photos/group {k:03}/IMG_{row:07}.jpg" for row, k in enumerate(clusters)]
    source = Fingerprint("features", "none", "none", "float32", f"{rows} x {DIM}, made up")
    cache, far = folder / f"embeddings_{rows}", np.empty(rows, np.float32)
    with EmbeddingWriter(cache, "train", source, rows, DIM, ids=ids, dtype=torch.float16) as writer:
        for start in range(0, rows, BLOCK):
            members = clusters[start : start + BLOCK]
            noise = 0.7 * random.standard_normal((len(members), DIM))
            far[start : start + BLOCK] = np.linalg.norm(noise, axis=1)
            x = torch.from_numpy((centers[members] + noise).astype(np.float32))
            writer.append(x, torch.arange(start, start + len(members)))
        writer.close()
    names = [f"group {k:02}" for k in range(COARSE)]
    table = arrow.table({
        "file": ids,
        "cluster": clusters.astype(np.int32),
        "confidence": 1 / (1 + np.exp(far - 5)),
        "split": ["train"] * rows,
        "label": [names[k * COARSE // FINE] for k in clusters],
        "outlier": far,
        f"level_{COARSE}": (clusters * COARSE // FINE).astype(np.int32),
    })  # fmt: skip
    if rows < CSV_ROWS:
        csv.write_csv(table, run / "assignments.csv")
    else:
        parquet.write_table(table, run / "assignments.parquet")
    digest = EmbeddingStore.open(cache, "train", verify=False).fingerprint.digest
    settings = {"DATASET": "made up", "DATASET_TEST": None, "COLUMN": None, "DATA_DIR": "data"}
    settings |= {"EMBEDDINGS_DIR": str(cache.absolute())}
    config = {"settings": settings, "learns_from": digest, "n_clusters": FINE}
    (run / "config.json").write_text(json.dumps(config))
    dataset = {"n_clusters": FINE, "pictured": False}
    metrics = {"dataset": dataset, "teacher": {"name": "features"}, "table": []}
    (run / "metrics.json").write_text(json.dumps(metrics))
    return run


def browser_memory() -> float:
    """Return the memory (PSS, in MiB) of all browser processes started by this process."""
    total, mine = 0.0, {os.getpid()}
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda p: int(p.name)):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent not in mine:
                continue
            mine.add(int(process.name))
            if b"chrom" in (process / "cmdline").read_bytes().partition(b"\0")[0]:
                rollup = (process / "smaps_rollup").read_text()
                total += sum(map(int, re.findall(r"^Pss:\s+(\d+)", rollup, re.M))) / 1024
        except (OSError, ValueError):
            continue  # the process has ended
    return total


@contextmanager
def served(run: Path, *flags: str) -> Iterator[tuple[float, int, str]]:
    """Start `ssl_kd explore` and yield its startup seconds, process ID and address."""
    started = time.perf_counter()
    argv = [sys.executable, "-u", "-m", "ssl_kd", "explore", str(run), "--port", "0", *flags]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if url := re.search(r"http://\S+token=\S+", line):
                yield time.perf_counter() - started, process.pid, url[0]
                return
        raise SystemExit(f"{' '.join(argv)} ended before it printed an address")
    finally:
        process.terminate()
        process.wait(30)


def dragged(page: Any, seconds: float = 4.0) -> float:
    """Return the frames per second while the map is dragged."""
    page.mouse.move(450, 400)
    page.mouse.down()
    page.evaluate(f"() => {{ globalThis.counted = ({FRAMES})({seconds}); }}")
    end, k = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        k += 1
        page.mouse.move(450 + 80 * np.sin(k / 10), 400 + 80 * np.cos(k / 10))
    frames = page.evaluate("() => counted")
    page.mouse.up()
    return frames


def wait_for_points(page: Any) -> None:
    """Wait until points show in the middle of the map."""
    end = time.perf_counter() + LIMIT
    while time.perf_counter() < end:
        picture = page.screenshot(clip={"x": 150, "y": 100, "width": 500, "height": 340})
        pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("L"))
        if (pixels != np.bincount(pixels.ravel()).argmax()).mean() > 0.005:
            return
    raise SystemExit(f"{page.url} shows no points after {LIMIT} s")


def page_memory(page: Any) -> float:
    """Return the heap and the typed arrays of a page in MiB."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("HeapProfiler.collectGarbage")
    used = devtools.send("Runtime.getHeapUsage")
    devtools.detach()
    return (used["usedSize"] + used.get("backingStorageSize", 0)) / 2**20


def filtered(page: Any) -> dict[str, float]:
    """Open the table and type a filter; return the seconds until its rows show, and the memory."""
    page.keyboard.press("b")
    page.wait_for_selector("#table tbody td")
    results = {"table_js_MiB": page_memory(page)}
    page.evaluate(FILTERED)
    page.fill("input[aria-label='Filter confidence']", "<0.5")
    until(page, "() => globalThis.filtered !== undefined", seconds=LIMIT)
    seconds = page.evaluate("() => filtered") / 1000
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    return results | {"filter_s": seconds}


def seconds_of(page: Any, script: str) -> float:
    """Return the seconds until an action has completed and been drawn."""
    page.evaluate(DRAWN)
    started = time.perf_counter()
    page.evaluate(script)
    page.evaluate(DRAWN)
    return time.perf_counter() - started


def lassoed(page: Any) -> dict[str, float]:
    """Draw a lasso around most of the map; return the seconds until its points are selected."""
    page.click("#lasso")
    page.mouse.move(40, 140)
    page.mouse.down()
    for corner in ((600, 140), (600, 780), (40, 780), (40, 150)):
        page.mouse.move(*corner, steps=5)
    started = time.perf_counter()
    page.mouse.up()
    until(page, "() => explore.chosen.length > 1", seconds=LIMIT)
    page.evaluate(DRAWN)
    seconds = time.perf_counter() - started
    return {"lasso_s": seconds, "lassoed": page.evaluate("() => explore.chosen.length")}


def visit(playwright: Any, url: str) -> dict[str, float]:
    """Measure one visit to a page in a new browser."""
    browser = launch(playwright)
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(1000 * LIMIT)
    empty, started = browser_memory(), time.perf_counter()
    page.goto(url)
    until(page, "() => document.body.dataset.ready", seconds=LIMIT)
    wait_for_points(page)
    results = {"load_s": time.perf_counter() - started}
    page.wait_for_timeout(3000)
    results["js_MiB"] = page_memory(page)
    results["browser_MiB"] = browser_memory() - empty
    results["frames"] = dragged(page)
    recolor = "() => { const c = document.getElementById('color'); c.value = 'outlier'; "
    results["color_s"] = seconds_of(page, recolor + "return c.onchange(); }")
    results |= filtered(page) | lassoed(page)
    search = "() => { document.getElementById('query').value = '99999'; return explore.search(); }"
    results["search_s"] = seconds_of(page, search)
    browser.close()
    return results


def screenshots(run: Path, folder: Path) -> None:
    """Save the pictures of docs/explore.md: the map with a cluster, and the table with doubts."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    with served(run) as (_, _, url), sync_playwright() as playwright:
        page = launch(playwright).new_page(viewport={"width": 1280, "height": 760})
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        page.locator("#clusters li > button").first.click()
        page.wait_for_timeout(1500)
        page.screenshot(path=folder / "explore.png")
        page.keyboard.press("Escape")
        page.keyboard.press("b")
        page.evaluate("explore.dock.filter({ confidence: '<0.8' })")
        page.evaluate("explore.dock.sortBy('confidence')")
        page.wait_for_timeout(1500)
        page.screenshot(path=folder / "explore_table.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--screenshots", type=Path, nargs=2, metavar=("RUN", "FOLDER"))
    args = parser.parse_args()
    if args.screenshots is not None:
        return screenshots(*args.screenshots)
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    run = made_run(args.folder, args.rows)
    has_map = (run / "map.pt").is_file()
    rounds: list[dict[str, float]] = []
    with sync_playwright() as playwright:
        for _ in range(ROUNDS):
            with served(run) as (start, pid, url):
                results = visit(playwright, url)
                rounds.append(results | {"start_s": start, "server_MiB": memory(pid)["VmHWM"]})
            print(json.dumps({k: round(v, 2) for k, v in rounds[-1].items()}), flush=True)
    print(f"{args.rows:,} samples, map {'cached' if has_map else 'computed in the first round'}")
    median = {k: statistics.median(one[k] for one in rounds) for k in rounds[0]}
    print("median:", json.dumps({k: round(v, 2) for k, v in median.items()}))


if __name__ == "__main__":
    main()
