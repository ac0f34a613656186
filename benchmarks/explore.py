"""The explorer's page: how long it takes to write and to load, its memory and its frames.

    python -m benchmarks.explore RUN                  # its page, with 100,000 samples
    python -m benchmarks.explore RUN --screenshot explore.png

Needs playwright and a Chromium on the path. The page of the run is written, and then its samples
are repeated, each a little apart, until there are `--rows`. Frames are counted while the map is
dragged for some seconds; without a graphics card Chromium draws on the processor, and all that else
runs there shows. Medians of some rounds are shown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from ssl_kd.explore import write_site
from ssl_kd.finished import Samples

FRAMES = """(seconds) => new Promise((done) => { let frames = 0; const start = performance.now();
  const count = () => { frames++; const past = (performance.now() - start) / 1000;
    past < seconds ? requestAnimationFrame(count) : done(frames / past); };
  requestAnimationFrame(count); })"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def enlarge(site: Path, rows: int) -> None:
    """Repeat the samples of a page until there are `rows`."""
    data, meta = site / "data", json.loads((site / "data/meta.json").read_text())
    again = np.arange(rows) % meta["samples"]
    places = np.fromfile(data / "places.f32", np.float32).reshape(2, -1)[:, again]
    places += np.random.default_rng(0).normal(0, 0.01, places.shape)
    places.clip(-1, 1).astype(np.float32).tofile(data / "places.f32")
    for column in meta["columns"].values():
        values = np.fromfile(data / column["file"], np.int32).reshape(meta["samples"], -1)
        values[again].tofile(data / column["file"])
    names = (data / "files.txt").read_text().split("\n")
    (data / "files.txt").write_text("\n".join(names[k] for k in again))
    meta |= {"samples": rows, "digest": "", "lines": []}
    (data / "meta.json").write_text(json.dumps(meta))


def measured(browser: Any, url: str, seconds: float) -> dict[str, float]:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    started = time.perf_counter()
    page.goto(url)
    page.wait_for_selector("body[data-ready]", timeout=120_000)
    loaded = time.perf_counter() - started
    page.wait_for_timeout(1000)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")
    devtools.send("HeapProfiler.collectGarbage")
    found = devtools.send("Performance.getMetrics")["metrics"]
    heap = {m["name"]: m["value"] for m in found}["JSHeapUsedSize"]
    buffers = devtools.send("Runtime.getHeapUsage").get("backingStorageSize", 0)
    page.mouse.move(600, 400)
    page.mouse.down()
    page.evaluate(f"() => {{ globalThis.counted = ({FRAMES})({seconds}); }}")
    until, k = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        k += 1
        page.mouse.move(600 + 80 * np.sin(k / 10), 400 + 80 * np.cos(k / 10))
    frames = page.evaluate("counted")
    page.mouse.up()
    page.close()
    return {"load": loaded, "MiB": (heap + buffers) / 2**20, "frames": frames}


def screenshot(browser: Any, url: str, file: Path) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 720})
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    largest = page.locator("#clusters button").first
    largest.click()
    page.wait_for_timeout(1500)
    page.screenshot(path=file)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--screenshot", type=Path)
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    flags = ["--no-sandbox", "--enable-unsafe-swiftshader"]
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        samples = Samples(args.run)
        started = time.perf_counter()
        site = write_site(samples, folder / "site").parent
        print(f"{len(samples)} samples, page written in {time.perf_counter() - started:.1f} s")
        sizes = [file.stat().st_size for file in site.rglob("*") if file.is_file()]
        print(f"{sum(sizes) / 2**20:.1f} MiB in {len(sizes)} files")
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        with served(site) as url:
            if args.screenshot is not None:
                screenshot(browser, f"{url}/explore.html", args.screenshot)
                return
            enlarge(site, args.rows)
            page = f"{url}/explore.html"
            rounds = [measured(browser, page, args.seconds) for _ in range(args.rounds)]
        browser.close()
    median = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    said = {key: round(value, 1) for key, value in median.items()}
    print(f"{args.rows} samples: {json.dumps(said)}")


if __name__ == "__main__":
    main()
