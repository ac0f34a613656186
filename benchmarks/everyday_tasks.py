"""The steps of ten everyday tasks in each program; `benchmarks.everyday` does and counts them.

A person does `click`, `type`, `key`, `drag` and `scroll`; `shell` is a command typed in a terminal.
`download` is a click that saves a file. `see` and `gone` wait. A text that begins with "no" says
why a program cannot do the task in the browser.
"""

from __future__ import annotations

CLUSTER = "ssl_kd train --dataset photos --teacher efficientnet_lite0 --n_clusters auto"
FIRST, SECOND, THIRD = (f"#clusters li:nth-child({k})" for k in (1, 2, 3))
DECIDED = "see #status:has-text('Written')"
DIALOG = "[role=dialog]"
FIELD = f"{DIALOG} input[type=text] >> nth="
ARROW = "[data-cy=sidebar-field-arrow-enabled-"
READ_ONLY = "no: nothing can be changed in the page"


def relabel(old: str, new: str, *view: str) -> list[str]:
    """Return the steps of FiftyOne's operator "Edit field values" that replace a label."""
    return [
        *("key `", "see [placeholder^='Search operations']", "type edit field values", "key Enter"),
        *(*view, f"click {FIELD}0", "type cluster.label", "key Enter", "click text=Add values"),
        *(f"click {FIELD}1", f"click [role=option]:has-text('{old} (')", f"click {FIELD}2"),
        *(f"type {new}", "key Enter", "click text=Execute", f"gone {DIALOG}"),
    ]


def only(field: str, placeholder: str, text: str) -> list[str]:
    """Return the steps of FiftyOne's sidebar that show only the samples with a value."""
    result = "[data-cy*=selector-result-]"
    return [f"click {ARROW}{field}]", f"click [placeholder='{placeholder}']", f"type {text}",
            f"click {result}:has-text('{text}')", "see text=/[0-9]+ samples/"]  # fmt: skip


# What is done after opening a page, the first of it once; not counted.
BEFORE = {
    "ssl_kd": ["see main", "see body[data-ready]"],
    "embedding-atlas 0.24": ["see text=of 7", "see text=of 7"],
    "FiftyOne 1.22": ["click text=Dismiss", "click text='Samples'"],
}
LOAD_FIFTYONE = """
import json, sys, time, numpy, fiftyone, fiftyone.brain
table = json.load(open(sys.argv[1]))
if fiftyone.dataset_exists("photos"):
    fiftyone.delete_dataset("photos")
photos = fiftyone.Dataset("photos")
for path, cluster, confidence, outlier, camera, place, day in zip(*(table[name] for name in (
        "path", "cluster", "confidence", "outlier", "camera", "place", "day"))):
    label = fiftyone.Classification(label=str(cluster), confidence=confidence)
    photos.add_sample(fiftyone.Sample(path, cluster=label, outlier=outlier, camera=camera,
                                      place=place, day=day))
fiftyone.brain.compute_visualization(
    photos, points=numpy.array([table["x"], table["y"]]).T, brain_key="map")
fiftyone.launch_app(photos, port=5178, address="127.0.0.1", remote=True)
while True:
    time.sleep(60)
"""
LASSOED = [*("click [data-cy=new-panel-btn]", "click text=Embeddings", "click text=last updated"),
           "click text='Select'", "see text=/^[0-9]+ points/",
           "drag canvas >> nth=-1 .1 .4 .45 .95",
           "see text=/[0-9]+ selected/"]  # fmt: skip
VIEW = f"click {DIALOG} >> text=Current view"
# Task -> the steps in ssl_kd, embedding-atlas and FiftyOne.
TASKS = {
    "find the blurred photos": (
        ["click #show-table", "see td", "scroll #table 2000 0", "click [title='Sort by sharpness']",
         "see [aria-sort=ascending]"],
        "no: needs code that measures sharpness",
        "no: needs code or a plugin that measures sharpness",
    ),
    "find and exclude duplicates": (
        ["shell ssl_kd curate run --exclude", "see #history li:has-text('xclude')"],
        "no: needs code",
        "no: needs code (FiftyOne Brain) or a plugin",
    ),
    "split a mixed cluster": (
        [f"click {FIRST} input", "click #split", DECIDED],
        READ_ONLY,
        [*only("cluster", "+ filter by label", "2"), *LASSOED, *relabel("2", "frogs", VIEW)],
    ),
    "merge two clusters": (
        [f"click {SECOND} .open", "click text=Merge with it", DECIDED],
        READ_ONLY,
        relabel("4", "1"),
    ),
    "name a cluster": (
        [f"click {THIRD} input", "key r", "type horses", "key Enter", DECIDED],
        READ_ONLY,
        relabel("0", "horses"),
    ),
    "export the doubtful as a table": (
        ["click #show-table", "click [aria-label='Filter confidence']", "type <0.5",
         "download #download"],
        ["click text=+ Add Predicate", "click .cm-content", "type confidence < 0.5",
         "click text='Add'", "click text='Predicate'", "click [title='Export Selection']",
         "download text='Export Selection'"],
        "no: needs code or the plugin @voxel51/io",
    ),
    "move the photos between two clusters": (
        [f"click {FIRST} .open", "click text=Select the ones between",
         "click article:first-of-type .buttons button:last-child", DECIDED],
        READ_ONLY,
        [*LASSOED, *relabel("horses", "1", VIEW)],
    ),
    "search by camera, and see in which clusters": (
        ["key /", "type X100V", "key Enter", "see #selected-about:has-text(' of ')"],
        ["click button[title=X100V]", "see text='99 points'",
         "scroll button[title=X100V] 0 -5000"],
        [*only("camera", "+ filter by camera", "X100V"), "click [data-cy=new-panel-btn]",
         "click text=Histograms", "click [placeholder='Select field']",
         "click text='cluster.label'",
         "see .recharts-surface"],
    ),
    "page through a cluster, mark it as checked": (
        [f"click {SECOND} button", "click #show-gallery", "see #gallery [role=option]",
         "scroll #gallery 0 300",
         "scroll #gallery 0 300", "key c", DECIDED],
        READ_ONLY,
        [*only("cluster", "+ filter by label", "1"), "scroll canvas 0 700", "scroll canvas 0 700",
         "click [data-cy=action-tag-sample-labels]", "click [placeholder^='+ tag']", "type checked",
         "key Enter", "click text=Apply"],
    ),
    "see a colleague's decision and undo it": (
        ["colleague", "see #history li:has-text('anna')", "click #history button",
         "see #history .undone"],
        READ_ONLY,
        "no: there is no history of changes",
    ),
}  # fmt: skip
TABLE = ["click #show-table", "see td"]
NAMES = {2: "frogs", 1: "ships and planes", 4: "cars", 0: "horses", 1000: "heads"}
# Section of docs/tutorial.md -> its steps; `look` is at that many pictures.
TUTORIAL = {
    "cluster": [f"shell {CLUSTER}"],
    "drop copies": ["shell ssl_kd curate runs/latest --images --exclude"],
    "open": ["open ssl_kd explore runs/latest --metadata photos.csv", "look 40", "picture map"],
    "drop blurred photos": [
        *TABLE, "scroll #table 2000 0", "click [aria-label='Filter sharpness']", "type <1.4",
        "scroll #table -2000 0", "click [aria-label='Filter camera']", "type old",
        "see #shown:has-text('2')", "picture table", "click #show-gallery", "look 23",
        "picture blurred", "key x", DECIDED, "click [data-of='3']", "look 2", "key x", DECIDED],
    "split": [
        "click [data-of='open 2']", "see article .buttons", "look 32", "picture cluster",
        "key t", DECIDED, "key Escape"],
    "name": [
        *(step for k, name in NAMES.items() for step in (
            f"click [data-of='{k}']", "look 20", "key r", f"type {name}", "key Enter",
            f"see #clusters b:has-text('{name}')")), "picture names"],
    "check the doubtful": [
        "key Escape", *TABLE, "click #clear-filters", "click [aria-label='Filter confidence']",
        "type <0.4", "see #shown:not(:has-text('310 of'))", "click #show-gallery",
        "look 21", "picture doubtful", "key c", DECIDED],
    "export": ["shell ssl_kd export runs/latest --to folders --link copy"],
}  # fmt: skip
