"""The explorer with very many samples, and embedding-atlas beside it: load, memory, frames.

    python -m benchmarks.explore FOLDER --rows 1000000     # FOLDER keeps the made-up run
    python -m benchmarks.explore FOLDER --screenshot RUN explore.png

Needs playwright and a Chromium. Where embedding-atlas is installed, the same samples go through
`ssl_kd export --to parquet`, its own command serves them, and rounds take turns. Each
visit has a fresh browser with the same flags. Medians are shown. Memory is what all processes of
the browser have more (PSS) than with an empty page, and that of the server; js is heap and typed
arrays of the page. Frames are counted while the map is dragged. Without a graphics card Chromium
draws on the processor, and all that else runs there shows.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from PIL import Image
from pyarrow import parquet

from benchmarks.made_run import made_run
from ssl_kd.explore import map_of
from ssl_kd.finished import Samples
from tests.explore.chromium import launch, until

FRAMES = """(seconds) => new Promise((done) => { let frames = 0; const start = performance.now();
  const count = () => { frames++; const past = (performance.now() - start) / 1000;
    past < seconds ? requestAnimationFrame(count) : done(frames / past); };
  requestAnimationFrame(count); })"""
DRAWN = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {
  const gl = explore.plot.map.get("regl")._gl;
  gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4)); done(); })))"""
READY = {
    "ssl_kd": "() => document.body.dataset.ready",
    "embedding-atlas": """() => /[1-9][0-9,]* points/.test(document.body.innerText)
      && [...document.querySelectorAll("canvas")].some((c) => c.width > 400)""",
}
LIMIT = 600  # seconds, of any one wait


def status(pid: int, key: str) -> float:
    """A line of /proc/PID/status, in MiB."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def browser_memory() -> float:
    """PSS of all processes that this one started and that are a browser, in MiB."""
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
            continue  # it has ended
    return total


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=LIMIT) as page:
            return page.status == 200
    except urllib.error.HTTPError:
        return True  # ours answers those alone who have the token
    except OSError:
        return False


@contextmanager
def served(words: list[str], port: int) -> Iterator[tuple[float, int, str]]:
    """Start a server; the seconds until it gives its page, its number, and the page's address."""
    started = time.perf_counter()
    printed = tempfile.TemporaryFile("w+")
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=printed, stderr=quiet)
    try:
        while time.perf_counter() - started < LIMIT and process.poll() is None:
            if answers(port):
                seconds = time.perf_counter() - started
                printed.seek(0)
                url = re.search(r"http://\S+token=\S+", printed.read())
                yield seconds, process.pid, url[0] if url else f"http://127.0.0.1:{port}/"
                return
            time.sleep(0.1)
        raise SystemExit(f"{' '.join(words)} gives no page on {port}")
    finally:
        process.terminate()
        process.wait(30)


def dragged(page: Any, seconds: float) -> float:
    """Frames a second while the map is dragged."""
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
    """Until there is something on the map to see: what stands in the middle of either page."""
    end = time.perf_counter() + LIMIT
    while time.perf_counter() < end:
        picture = page.screenshot(clip={"x": 150, "y": 100, "width": 500, "height": 340})
        pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("L"))
        if (pixels != np.bincount(pixels.ravel()).argmax()).mean() > 0.005:
            return
    raise SystemExit(f"{page.url} shows no points after {LIMIT} s")


def seconds_of(page: Any, act: str) -> float:
    """How long the page takes for something, and until it is drawn."""
    page.evaluate(DRAWN)
    started = time.perf_counter()
    page.evaluate(act)
    page.evaluate(DRAWN)
    return time.perf_counter() - started


def lassoed(page: Any) -> dict[str, float]:
    """How long it takes from the end of a line around most of the map until they are selected."""
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


def visit(playwright: Any, who: str, url: str, seconds: float) -> dict[str, float]:
    """One look at a page, by a browser of its own."""
    browser = launch(playwright)
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(1000 * LIMIT)
    empty, started = browser_memory(), time.perf_counter()
    page.goto(url)
    until(page, READY[who], seconds=LIMIT)
    wait_for_points(page)
    found = {"load_s": time.perf_counter() - started}
    page.wait_for_timeout(3000)
    devtools = page.context.new_cdp_session(page)
    devtools.send("HeapProfiler.collectGarbage")
    used = devtools.send("Runtime.getHeapUsage")
    found["js_MiB"] = (used["usedSize"] + used.get("backingStorageSize", 0)) / 2**20
    found["browser_MiB"] = browser_memory() - empty
    found["frames"] = dragged(page, seconds)
    if who == "ssl_kd":
        colour = "() => { const c = document.getElementById('colour'); c.value = 'outlier'; "
        found["colour_s"] = seconds_of(page, colour + "return c.onchange(); }")
        found |= lassoed(page)
        act = "() => { document.getElementById('query').value = '99999'; return explore.search(); }"
        found["search_s"] = seconds_of(page, act)
    browser.close()
    return found


def for_atlas(run: Path, folder: Path) -> Path:
    """The same samples, at the same places, as embedding-atlas reads them."""
    out = folder / f"{run.name}.parquet"
    if not out.is_file():
        places, columns = map_of(Samples(run)), folder / "places.parquet"
        parquet.write_table(arrow.table({"x": places[:, 0], "y": places[:, 1]}), columns)
        words = ["export", str(run), "--to", "parquet", "--out", str(out)]
        command = [sys.executable, "-m", "ssl_kd", *words, "--columns", str(columns)]
        subprocess.run(command, check=True)
    return out


def commands(run: Path, folder: Path) -> dict[str, tuple[list[str], int]]:
    ours, theirs = free_port(), free_port()
    found = {"ssl_kd": (["ssl_kd", "explore", str(run), "--port", str(ours)], ours)}
    if importlib.util.find_spec("embedding_atlas"):
        words = ["embedding_atlas.cli", str(for_atlas(run, folder)), "--x", "x", "--y", "y"]
        words += ["--port", str(theirs), "--host", "127.0.0.1"]
        found["embedding-atlas"] = (words, theirs)
    return found


def screenshot(run: Path, file: Path) -> None:
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    port = free_port()
    with served(["ssl_kd", "explore", str(run), "--port", str(port)], port) as (_, _, url):
        with sync_playwright() as playwright:
            browser = launch(playwright)
            page = browser.new_page(viewport={"width": 1200, "height": 720})
            page.goto(url)
            page.wait_for_selector("body[data-ready]")
            page.locator("#clusters button").first.click()
            page.wait_for_timeout(1500)
            page.screenshot(path=file)
            browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--screenshot", type=Path, nargs=2, metavar=("RUN", "FILE"))
    args = parser.parse_args()
    if args.screenshot is not None:
        return screenshot(*args.screenshot)
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    run = made_run(args.folder, args.rows)
    kept = (run / "map.pt").is_file()
    rounds: dict[str, list[dict[str, float]]] = {}
    with sync_playwright() as playwright:
        for _ in range(args.rounds):
            for who, (words, port) in commands(run, args.folder).items():
                with served(words, port) as (start, pid, url):
                    found = visit(playwright, who, url, args.seconds)
                    found |= {"start_s": start, "server_MiB": status(pid, "VmHWM")}
                rounds.setdefault(who, []).append(found)
                print(who, json.dumps({k: round(v, 2) for k, v in found.items()}), flush=True)
    print(f"{args.rows:,} samples, the map {'was kept' if kept else 'is made in the first round'}")
    for who, all_rounds in rounds.items():
        median = {k: statistics.median(one[k] for one in all_rounds) for k in all_rounds[0]}
        print(f"median: {who}", json.dumps({k: round(v, 2) for k, v in median.items()}))


if __name__ == "__main__":
    main()
