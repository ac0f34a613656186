"""Count steps and seconds of ten everyday tasks, done in a browser by script in three programs.

    python -m benchmarks.everyday FOLDER --photos cifar10/test     # FOLDER keeps photos and run
    python -m benchmarks.everyday FOLDER --photos cifar10/test --tutorial docs/tutorial
    python -m benchmarks.everyday FOLDER --atlas VENV/bin/embedding-atlas --fiftyone VENV/bin/python

Makes 310 photos with a table of metadata and clusters them; the peers get the same clusters,
columns and map. The steps are in `everyday_tasks.py`: a click, a drag, a text, a key, and scrolling
to a control are one each. Seconds are the machine's, from the first action to the result. A
person's follow the keystroke-level model (Card, Moran and Newell, 1980): 1.35 s to prepare each
step, 1.1 s to point, 0.2 s for a click or a key. `--tutorial` does the steps of docs/tutorial.md
and takes its pictures; half a second for each picture that is looked at comes on top there.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as arrow
from PIL import Image, ImageFilter
from pyarrow import parquet

from benchmarks.everyday_tasks import BEFORE, CLUSTER, LOAD_FIFTYONE, TASKS, TUTORIAL
from benchmarks.explore import served
from benchmarks.turns import header, row
from ssl_kd import Run
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.decisions import Curation
from ssl_kd.workbench.explore.map_layout import map_of
from tests.workbench.explore.chromium import FLAGS, chromium

CLASSES = ("airplane", "automobile", "bird", "frog", "horse", "ship")
BLURRED, COPIES, DIFFERENT = 20, 14, 295  # and one black: 310 photos
CAMERAS = ("X100V", "Pixel 8", "old phone")
PREPARE, POINT, PRESS, LOOK = 1.35, 1.1, 0.2, 0.5  # seconds of a person
PICTURE_BYTES = 60_000
LIMIT = 60_000  # milliseconds, of any one wait
WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
ON_TOP = """e => { const b = e.getBoundingClientRect(),
  top = document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2);
  return top !== null && (e.contains(top) || top.contains(e)); }"""


def make_photos(source: Path, folder: Path) -> None:
    """Write 310 photos, and photos.csv beside their folder with camera, place and day of each."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    files = [file for name in CLASSES for file in sorted((source / name).iterdir())]
    rng.shuffle(files)
    photos = [(Image.open(f).convert("RGB"), f.parent.name, rng.choice(CAMERAS)) for f in files]
    sharp, old = photos[BLURRED:DIFFERENT], CAMERAS[2]
    blur = ImageFilter.GaussianBlur(1.5)
    blurred = [(image.filter(blur), name, old) for image, name, _ in photos[:BLURRED]]
    copies = [(saved_again(image), name, camera) for image, name, camera in sharp[:COPIES]]
    photos = [*sharp, *blurred, *copies, (Image.new("RGB", (32, 32)), "", old)]
    rng.shuffle(photos)
    places = {"airplane": "airport", "automobile": "street", "ship": "harbor"}
    with (folder.parent / "photos.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "camera", "place", "day"])
        for number, (image, name, camera) in enumerate(photos, 1):
            image.save(folder / f"IMG_{number:04}.jpg", quality=95)
            day = f"2026-{rng.randint(5, 9):02}-{rng.randint(1, 28):02}"
            table.writerow([f"IMG_{number:04}.jpg", camera, places.get(name, "farm"), day])


def saved_again(image: Image.Image) -> Image.Image:
    """Return an image as it is after a program has saved it as a JPEG of lower quality."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return Image.open(buffer)


def prepare(folder: Path) -> Path:
    """Cluster the photos, measure them, join their table, and return the run."""
    run = folder / "prepared"
    if not run.is_dir():
        shell(folder, CLUSTER)
        shell(folder, "ssl_kd curate runs/latest --images")
        shell(folder, "ssl_kd explore runs/latest --metadata photos.csv --static page")
        shutil.copytree((folder / "runs/latest").resolve(), run)
        shutil.rmtree(run / "curated")
    table = Run.open(run).frame()
    table["path"] = [str(Path("photos", name).absolute()) for name in table["file"]]
    table["x"], table["y"] = map_of(Samples(run)).T
    Path("peers.json").write_text(json.dumps(table.to_dict("list"), default=str))
    pictures = arrow.array([{"bytes": Path(path).read_bytes()} for path in table["path"]])
    frame = arrow.Table.from_pandas(table).append_column("image", pictures)
    parquet.write_table(frame, folder / "peers.parquet")
    return run


def shell(folder: Path, command: str) -> None:
    """Run a command in a folder; stop with its output if it fails."""
    argv = [sys.executable, "-m", *command.split()]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")


class Hands:
    """A person's hands: they do the steps of a task, and count them and a person's seconds."""

    def __init__(
        self, page: Any, folder: Path, pictures: Path | None = None, servers: Any = None
    ) -> None:
        self.page, self.folder, self.pictures, self.servers = page, folder, pictures, servers
        self.steps, self.person, self.machine = 0, 0.0, 0.0

    def do(self, steps: Sequence[str]) -> None:
        """Do the steps, and wait for what they wait for."""
        started = time.perf_counter()
        for step in steps:
            verb, _, rest = step.partition(" ")
            getattr(self, verb)(rest)
        self.machine += time.perf_counter() - started

    def count(self, seconds: float) -> None:
        self.steps += 1
        self.person += PREPARE + seconds

    def click(self, selector: str) -> None:
        target = self.page.locator(selector).first
        target.wait_for()
        if not target.evaluate(ON_TOP):
            self.count(POINT)  # it scrolls there first
            target.scroll_into_view_if_needed()
        target.click()
        self.count(POINT + PRESS)

    def download(self, selector: str) -> None:
        with self.page.expect_download() as saving:
            self.click(selector)
        saving.value.path()

    def type(self, text: str) -> None:
        self.page.keyboard.type(text)
        self.count(PRESS * len(text))

    def key(self, name: str) -> None:
        self.page.keyboard.press(name)
        self.count(PRESS)

    def scroll(self, rest: str) -> None:
        selector, across, down = rest.rsplit(" ", 2)
        self.page.locator(selector).first.hover()
        self.page.mouse.wheel(int(across), int(down))
        self.count(POINT)

    def drag(self, rest: str) -> None:
        selector, *shares = rest.rsplit(" ", 4)
        box = self.page.locator(selector).first.bounding_box()
        left, top, right, bottom = map(float, shares)
        corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top + 0.02)]
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in corners]
        self.page.mouse.move(*places[0])
        self.page.mouse.down()
        for place in places[1:]:
            self.page.mouse.move(*place, steps=5)
        self.page.mouse.up()
        self.count(POINT * len(places) + PRESS)

    def shell(self, command: str) -> None:
        shell(self.folder, command)
        self.count(PRESS * len(command))
        self.count(PRESS)  # Enter

    def open(self, command: str) -> None:
        """Type the command that serves a run, and open the address that it prints."""
        self.count(PRESS * len(command))
        self.count(POINT + PRESS)
        run, *flags = command.split()[2:]
        _, _, url = self.servers.enter_context(served(Path(run), *flags))
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]")

    def see(self, selector: str) -> None:
        self.page.locator(selector).first.wait_for()

    def gone(self, selector: str) -> None:
        self.page.locator(selector).first.wait_for(state="hidden")

    def colleague(self, _: str) -> None:
        curation = Curation.open(self.folder / "run", by="anna")
        curation.rename(int(curation.clusters[0]), "old name")

    def look(self, pictures: str) -> None:
        self.person += LOOK * int(pictures)

    def picture(self, name: str) -> None:
        """Save a picture of the page, if pictures are wanted."""
        if self.pictures is not None:
            self.page.wait_for_timeout(800)
            image = Image.open(io.BytesIO(self.page.screenshot()))
            for quality in range(75, 0, -5):
                image.save(self.pictures / f"{name}.webp", quality=quality, method=6)
                if (self.pictures / f"{name}.webp").stat().st_size < PICTURE_BYTES:
                    break


@contextmanager
def started(argv: Sequence[str], url: str) -> Iterator[str]:
    """Start a peer's server, wait until it answers, and yield its address."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(LIMIT // 1000):
            try:
                urlopen(url, timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def server(program: str, folder: Path, args: argparse.Namespace) -> Iterator[str]:
    """Serve fresh data by one of the programs; yield the address of its page."""
    if program == "ssl_kd":
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(folder / "prepared", folder / "run")
        with served(folder / "run") as (_, _, url):
            yield url
    elif program.startswith("embedding"):
        flags = ("--x", "x", "--y", "y", "--image", "image", "--port", "5077", "--no-auto-port")
        argv = [args.atlas, str(folder / "peers.parquet"), *flags]
        with started(argv, "http://localhost:5077") as url:
            yield url
    else:
        argv = [args.fiftyone, "-c", LOAD_FIFTYONE, str(folder / "peers.json")]
        with started(argv, "http://127.0.0.1:5178/datasets/photos") as url:
            yield url


def measure(browser: Any, program: str, place: int, args: argparse.Namespace) -> dict[str, list]:
    """Do all tasks once in a program; return steps, seconds and a person's seconds of each."""
    results: dict[str, list] = {}
    with server(program, args.folder, args) as url:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(LIMIT)
        for task, tools in TASKS.items():
            if isinstance(tools[place], str):
                continue
            hands = Hands(page, args.folder)
            try:
                page.goto(url)
                Hands(page, args.folder).do(BEFORE[program][bool(results) :])
                page.wait_for_timeout(1500)
                hands.do(tools[place])
            except Exception as error:  # the other tasks are still measured
                print(f"{program}, {task}: {error}", file=sys.stderr, flush=True)
                page.screenshot(path=args.folder / f"failed_{len(task)}.png")
                continue
            results[task] = [hands.steps, hands.machine, hands.person]
        page.close()
    return results


def tutorial(browser: Any, folder: Path, pictures: Path) -> None:
    """Do the steps of docs/tutorial.md; print the steps and seconds of each."""
    pictures.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport={"width": 1120, "height": 700})
    page.set_default_timeout(LIMIT)
    header("step", "steps", "a person's seconds", "the machine's seconds")
    with ExitStack() as servers:
        for name, steps in TUTORIAL.items():
            hands = Hands(page, folder, pictures, servers)
            hands.do(steps)
            row(name, str(hands.steps), f"{hands.person:.0f}", f"{hands.machine:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", type=Path, help="folder of CIFAR-10's JPEGs, one per class")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--atlas", help="program embedding-atlas")
    parser.add_argument("--fiftyone", help="Python of an environment with fiftyone")
    parser.add_argument("--tutorial", type=Path, help="folder of the tutorial's pictures")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    args.photos = args.photos and args.photos.absolute()
    args.tutorial = args.tutorial and args.tutorial.absolute()
    os.chdir(args.folder)  # a run finds its photos from the folder that it was started in
    args.folder = Path()
    if not (args.folder / "photos").is_dir():
        make_photos(args.photos, args.folder / "photos")
    if args.tutorial is None:
        prepare(args.folder)
    installed = {
        "ssl_kd": True,
        **dict(zip([*BEFORE][1:], (args.atlas, args.fiftyone), strict=True)),
    }
    rounds: dict[str, list[dict[str, list]]] = {name: [] for name in BEFORE if installed[name]}
    with sync_playwright() as playwright:
        flags = [*FLAGS, *WEBGPU]
        browser = playwright.chromium.launch(executable_path=chromium(playwright), args=flags)
        if args.tutorial is not None:
            return tutorial(browser, args.folder, args.tutorial)
        for _ in range(args.rounds):
            for program in rounds:
                place = [*BEFORE].index(program)
                rounds[program].append(measure(browser, program, place, args))
    header("task", *rounds)
    for task, tools in TASKS.items():
        cells = [task]
        for program, results in rounds.items():
            done = [result[task] for result in results if task in result]
            plan = tools[[*BEFORE].index(program)]
            if done:
                steps, seconds, person = map(statistics.median, zip(*done, strict=True))
                cells.append(f"{steps:.0f} steps, {seconds:.1f} s ({person:.0f} s)")
            else:
                cells.append(plan if isinstance(plan, str) else "failed")
        row(*cells)


if __name__ == "__main__":
    main()
