"""Count steps and seconds of ten everyday tasks in the explorer, done in a browser by script.

    python -m benchmarks.everyday FOLDER --photos cifar10/test     # FOLDER keeps photos and run
    python -m benchmarks.everyday FOLDER --photos cifar10/test --tutorial docs/tutorial

Makes 310 photos with a table of metadata and clusters them. Seconds are the machine's, from the
first action to the result. A person's follow the keystroke-level model (Card, Moran and Newell,
1980): 1.35 s to prepare each step, 1.1 s to point, 0.2 s for a click or a key. `--tutorial` does
the steps of docs/tutorial.md and takes its pictures; half a second for each picture that is looked
at comes on top there.

A person does `click`, `type`, `key` and `scroll`; `shell` is a command typed in a terminal, and
`download` a click that saves a file. `see` waits.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from PIL import Image, ImageFilter

from benchmarks.curate import jpeg
from benchmarks.explore import served
from benchmarks.turns import header, row
from ssl_kd_explore.decisions import Curation
from tests.explore.explore.chromium import launch

CLASSES = ("airplane", "automobile", "bird", "frog", "horse", "ship")
BLURRED, COPIES, DIFFERENT = 20, 14, 295  # and one black: 310 photos
CAMERAS = ("X100V", "Pixel 8", "old phone")
PREPARE, POINT, PRESS, LOOK = 1.35, 1.1, 0.2, 0.5  # seconds of a person
PICTURE_BYTES = 60_000
LIMIT = 60_000  # milliseconds, of any one wait
ON_TOP = """e => { const b = e.getBoundingClientRect(),
  top = document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2);
  return top !== null && (e.contains(top) || top.contains(e)); }"""
CLUSTER = "ssl_kd train --dataset photos --teacher efficientnet_lite0 --n_clusters"
FIRST, SECOND, THIRD = (f"#clusters li:nth-child({k})" for k in (1, 2, 3))
DECIDED = "see #status:has-text('Written')"
TABLE = ["click #show-table", "see td"]
TASKS = {
    "find the blurred photos": [
        *TABLE, "scroll #table 2000 0", "click [title='Sort by sharpness']",
        "see [aria-sort=ascending]"],
    "find and exclude duplicates": [
        "shell ssl_kd curate run --exclude", "see #history li:has-text('xclude')"],
    "split a mixed cluster": [f"click {FIRST} input", "click #split", DECIDED],
    "merge two clusters": [f"click {SECOND} .open", "click text=Merge with it", DECIDED],
    "name a cluster": [f"click {THIRD} input", "key r", "type horses", "key Enter", DECIDED],
    "export the doubtful as a table": [
        "click #show-table", "click [aria-label='Filter confidence']", "type <0.5",
        "download #download"],
    "move the photos between two clusters": [
        f"click {FIRST} .open", "click text=Select the ones between",
        "click article:first-of-type .buttons button:last-child", DECIDED],
    "search by camera, and see in which clusters": [
        "key /", "type X100V", "key Enter", "see #selected-about:has-text(' of ')"],
    "page through a cluster, mark it as checked": [
        f"click {SECOND} button", "click #show-gallery", "see #gallery [role=option]",
        "scroll #gallery 0 300", "scroll #gallery 0 300", "key c", DECIDED],
    "see a colleague's decision and undo it": [
        "colleague", "see #history li:has-text('anna')", "click #undo",
        "see #history .undone"],
}  # fmt: skip
NAMES = {
    1: "ships and planes",
    2: "frogs",
    5: "cars",
    0: "horses",
    3: "birds",
    1000: "birds and planes",
}
# Section of docs/tutorial.md -> its steps; `look` is at that many pictures.
TUTORIAL = {
    "cluster": [f"shell {CLUSTER} 6"],
    "drop copies": ["shell ssl_kd curate runs/latest --images --exclude"],
    "open": ["open ssl_kd explore runs/latest --metadata photos.csv", "look 40", "picture map"],
    "drop blurred photos": [
        *TABLE, "scroll #table 400 0", "click [aria-label='Filter sharpness']", "type <1.4",
        "click [aria-label='Filter camera']", "type old",
        "see #shown:has-text('22 of')", "picture table", "click #show-gallery", "look 22",
        "picture blurred", "key x", DECIDED],
    "split": [
        "click [data-of='open 3']", "see article .buttons", "look 32", "picture cluster",
        "key t", DECIDED, "key Escape"],
    "name": [
        *(step for k, name in NAMES.items() for step in (
            f"click [data-of='{k}']", "look 20", "key r", f"type {name}", "key Enter",
            f"see #clusters b:has-text('{name}')")), "picture names"],
    "check the doubtful": [
        "key Escape", "click #show-table", "click #clear-filters", "see td",
        "scroll #table -2000 0", "click [aria-label='Filter confidence']", "type <0.4",
        "see #shown:not(:has-text('273 of'))", "click #show-gallery", "look 14",
        "picture doubtful", "key c", DECIDED],
    "export": ["shell ssl_kd export runs/latest --to folders --link copy"],
}  # fmt: skip


def make_photos(source: Path) -> None:
    """Write 310 photos to `photos`, and photos.csv with camera, place and day of each."""
    os.mkdir("photos")
    rng = random.Random(0)
    files = [file for name in CLASSES for file in sorted((source / name).iterdir())]
    rng.shuffle(files)
    photos = [(Image.open(f).convert("RGB"), f.parent.name, rng.choice(CAMERAS)) for f in files]
    sharp, old = photos[BLURRED:DIFFERENT], CAMERAS[2]
    blur = ImageFilter.GaussianBlur(1.5)
    blurred = [(image.filter(blur), name, old) for image, name, _ in photos[:BLURRED]]
    copies = [(jpeg(image, 85), name, camera) for image, name, camera in sharp[:COPIES]]
    photos = [*sharp, *blurred, *copies, (Image.new("RGB", (32, 32)), "", old)]
    rng.shuffle(photos)
    places = {"airplane": "airport", "automobile": "street", "ship": "harbor"}
    with open("photos.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "camera", "place", "day"])
        for number, (image, name, camera) in enumerate(photos, 1):
            image.save(f"photos/IMG_{number:04}.jpg", quality=95)
            day = f"2026-{rng.randint(5, 9):02}-{rng.randint(1, 28):02}"
            table.writerow([f"IMG_{number:04}.jpg", camera, places.get(name, "farm"), day])


def prepare() -> None:
    """Cluster the photos, measure them and join their table, unless `prepared` exists."""
    if not Path("prepared").is_dir():
        shell(f"{CLUSTER} auto")
        shell("ssl_kd curate runs/latest --images")
        shell("ssl_kd explore runs/latest --metadata photos.csv --static page")
        shutil.copytree(Path("runs/latest").resolve(), "prepared")
        shutil.rmtree("prepared/curated")


def shell(command: str) -> None:
    """Run a command; stop with its output if it fails."""
    argv = [sys.executable, "-m", *command.split()]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")


class Hands:
    """A person's hands: they do the steps of a task, and count them and a person's seconds."""

    def __init__(self, page: Any, pictures: Path | None = None, servers: Any = None) -> None:
        self.page, self.pictures, self.servers = page, pictures, servers
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

    def shell(self, command: str) -> None:
        shell(command)
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

    def colleague(self, _: str) -> None:
        curation = Curation.open(Path("run"), by="anna")
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


def measure(browser: Any) -> dict[str, tuple[int, float, float]]:
    """Do all tasks once on fresh data; return steps, seconds and a person's seconds of each."""
    results = {}
    shutil.rmtree("run", ignore_errors=True)
    shutil.copytree("prepared", "run")
    with served(Path("run")) as (_, _, url):
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(LIMIT)
        for task, steps in TASKS.items():
            hands = Hands(page)
            try:
                page.goto(url)
                hands.see("body[data-ready]")
                page.wait_for_timeout(1500)
                hands.do(steps)
            except Exception as error:  # the other tasks are still measured
                print(f"{task}: {error}", file=sys.stderr, flush=True)
                page.screenshot(path=f"failed_{len(task)}.png")
                continue
            results[task] = (hands.steps, hands.machine, hands.person)
        page.close()
    return results


def tutorial(browser: Any, pictures: Path) -> None:
    """Do the steps of docs/tutorial.md; print the steps and seconds of each."""
    pictures.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport={"width": 1440, "height": 860})
    page.set_default_timeout(LIMIT)
    header("step", "steps", "a person's seconds", "the machine's seconds")
    with ExitStack() as servers:
        for name, steps in TUTORIAL.items():
            hands = Hands(page, pictures, servers)
            hands.do(steps)
            row(name, str(hands.steps), f"{hands.person:.0f}", f"{hands.machine:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", type=Path, required=True, help="CIFAR-10: FOLDER/<class>/*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tutorial", type=Path, help="folder of the tutorial's pictures")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    photos, pictures = (path and path.absolute() for path in (args.photos, args.tutorial))
    os.chdir(args.folder)  # a run finds its photos from the folder that it was started in
    if not os.path.isdir("photos"):
        make_photos(photos)
    if pictures is None:
        prepare()
    with sync_playwright() as playwright:
        browser = launch(playwright)
        if pictures is not None:
            return tutorial(browser, pictures)
        rounds = [measure(browser) for _ in range(args.rounds)]
    header("task", "ssl_kd")
    for task in TASKS:
        done = [results[task] for results in rounds if task in results]
        cell = "failed"
        if done:
            steps, seconds, person = map(statistics.median, zip(*done, strict=True))
            cell = f"{steps:.0f} steps, {seconds:.1f} s ({person:.0f} s)"
        row(task, cell)


if __name__ == "__main__":
    main()
