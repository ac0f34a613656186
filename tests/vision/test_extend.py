"""New samples for a finished run: joined, offered and refused ones, and kill -9."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_kd.cli import train
from ssl_kd.core.errors import InputError
from ssl_kd.core.runs.folder import RunFolderError
from ssl_kd.core.settings import SettingsError
from ssl_kd.vision.estimator import MultiHeadClusterer
from ssl_kd.vision.extend import DECIDED, extend, inherited
from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.new_clusters import comparable, find_new_clusters
from ssl_kd.vision.report import run_samples, write_report
from ssl_kd.vision.run import run
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.sources import SOURCES
from ssl_kd_explore.decisions import Curation, curation
from ssl_kd_explore.export.content import Content
from tests.faults.matrix import row as fault
from tests.kill_writers import kill_again_and_again
from tests.vision.test_run import FAST, assignments, metrics

CENTRES = 4 * np.eye(8)[:6]


def blobs(classes, each, seed):
    """Samples around some of six centres, shuffled, and their classes."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(classes, each))
    return (CENTRES[labels] + rng.normal(size=(len(labels), 8))).astype(np.float32), labels


def save(folder, name, classes, each, seed):
    x, labels = blobs(classes, each, seed)
    np.savez(folder / name, features=x, labels=labels)
    return str(folder / name)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A finished run of the first three classes; every test leaves it as it was."""
    root = tmp_path_factory.mktemp("parent")
    asked = {"dataset": save(root, "old.npz", range(3), 80, 0), "embeddings_dir": str(root / "e")}
    asked |= {"runs_dir": str(root / "runs"), "run_name": "parent", "n_clusters": 3}
    path = run(VisionSettings(**{**FAST, "max_steps": 60, **asked}))
    write_report(path)
    before = content(path)
    yield path
    assert content(path) == before


def content(path):
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.fixture
def settings(parent, tmp_path):
    """Settings of an extension of the parent, as a command would give them."""

    def asked(dataset, **given):
        given = {
            "dataset": str(dataset),
            "extend": str(parent),
            "runs_dir": str(tmp_path / "runs"),
            "embeddings_dir": str(tmp_path / "embeddings"),
            **given,
        }
        return inherited(VisionSettings(**given), given)

    return asked


def joined(path, split="extend1"):
    rows = [row for row in assignments(path) if row["split"] == split]
    return [int(row["cluster"]) for row in rows], [int(row["label"]) for row in rows]


def test_known_classes_join_and_an_unseen_one_is_offered(parent, settings, tmp_path):
    new = save(tmp_path, "new.npz", range(4), 40, 1)
    path = extend(settings(new))

    before = (parent / "assignments.csv").read_bytes()
    assert (path / "assignments.csv").read_bytes().startswith(before)
    clusters, labels = map(np.array, joined(path))
    assert len(clusters) == 160
    assert (clusters[labels == 3] == 3).mean() > 0.9 and (clusters[labels != 3] < 3).mean() > 0.98
    x = torch.from_numpy(np.load(new)["features"])
    kept = ClusterModel.from_pretrained(parent).predict(x).numpy()
    assert (clusters == kept)[clusters < 3].all()

    about = metrics(path)["extended"]
    sizes = np.bincount(clusters, minlength=4)
    assert metrics(path)["cluster_sizes"] == sizes.tolist()
    assert (about["joined"], about["n"]) == (sizes[:3].sum(), 160)
    (offered,) = about["new_clusters"]
    assert (offered["cluster"], offered["size"]) == (3, sizes[3])
    assert all(labels[int(name)] == 3 for name in offered["typical"])
    assert metrics(path)["table"][0]["acc"] > 0.95
    model = ClusterModel.from_pretrained(path)
    assert (model.predict(x).numpy() == clusters).all() and model.n_clusters == 4
    loaded = MultiHeadClusterer.from_pretrained(path)
    assert (loaded.predict(x.numpy()) == clusters).all()
    assert (loaded.n_clusters, loaded.n_clusters_, loaded.new_clusters_.tolist()) == (3, 4, [3])
    scores = [float(row["outlier"]) for row in assignments(path)[240:] if "outlier" in row]
    scores = np.array(scores or model.outlier_scores(x).tolist())
    assert (scores[clusters == 3] <= 0.4).all() and scores[clusters < 3].max() > 0.8
    page = write_report(path).read_text()
    assert f"{sizes[:3].sum()} of 160 new samples joined" in page
    assert os.readlink(path.parent / "latest") == path.name


def test_a_known_sample_keeps_its_cluster_in_the_extended_model(parent, settings, tmp_path):
    path = extend(settings(save(tmp_path, "new.npz", [2, 3], 60, 1)))
    old = torch.from_numpy(np.load(parent.parents[1] / "old.npz")["features"])
    before, after = (ClusterModel.from_pretrained(p).predict_proba(old) for p in (parent, path))
    assert after.shape == (240, 4) and (after[:, 3:] == 0).all()
    assert torch.equal(after[:, :3], before)


@pytest.mark.parametrize(
    "classes", [range(3), [1], [0, 0, 0, 0, 2]], ids=["the same", "one of them", "another mixture"]
)
def test_no_cluster_is_offered_where_nothing_is_new(settings, tmp_path, classes):
    path = extend(settings(save(tmp_path, "new.npz", classes, 60, 1)))
    assert metrics(path)["extended"]["new_clusters"] == []
    assert max(joined(path)[0]) < 3 and ClusterModel.from_pretrained(path).offers is None


def test_copies_of_one_sample_are_not_a_cluster(settings, tmp_path):
    x, labels = blobs(range(3), 30, 1)
    x[:20], labels[:20] = 3 * CENTRES[3] + 1, 3  # far out, twenty times the same
    np.savez(tmp_path / "new.npz", features=x, labels=labels)
    path = extend(settings(tmp_path / "new.npz"))
    assert metrics(path)["extended"]["new_clusters"] == []
    assert all("extend1" == row["split"] for row in assignments(path)[240:])


@fault(176)
def test_decisions_about_a_run_hold_in_its_extension(parent, settings, tmp_path):
    assert DECIDED == curation.FILE
    decided = shutil.copytree(parent, tmp_path / "decided")
    people = Curation.open(decided)
    people.rename(2, "the third")
    people.merge([0, 1], "both")
    people.exclude([5, 7])
    people.check(cluster=2)
    checked = people.checked
    row = int(np.flatnonzero(people.clusters == 2)[0])
    made = people.split(2, [row])["new"]
    new = save(tmp_path, "new.npz", range(4), 40, 1)
    path = extend(settings(new, extend=str(decided)))
    grown = Curation.open(path)
    assert grown.names == {0: "both", 2: "the third"} and grown.lines == people.lines
    n = len(people.clusters)
    assert (grown.clusters[:n] == people.clusters).all() and grown.excluded.sum() == 2
    run_says = np.array(joined(path)[0])
    assert (grown.clusters[n:] == np.where(run_says == 1, 0, run_says)).all()
    assert checked.any() and grown.checked.tolist() == [*checked, *[False] * len(run_says)]
    assert grown.clusters[row] == made and 3 in grown.sizes and made not in run_says
    grown.undo()  # each line can still be taken back, and new ones added
    grown.rename(3, "the new ones")
    again = extend(settings(save(tmp_path, "x.npz", [4], 40, 3), extend=str(path)))
    assert Curation.open(again).names == grown.names
    assert Content.of(Samples(again)).cluster_names()[3] == "the new ones"


def test_an_extended_run_is_extended_again(settings, tmp_path):
    first = extend(settings(save(tmp_path, "one.npz", range(4), 40, 1), run_name="one"))
    both = save(tmp_path, "two.npz", range(5), 40, 2)
    second = extend(settings(both, extend=str(first), run_name="two"))
    assert (
        (second / "assignments.csv")
        .read_bytes()
        .startswith((first / "assignments.csv").read_bytes())
    )
    clusters, labels = map(np.array, joined(second, "extend2"))
    assert (clusters[labels == 3] == 3).mean() > 0.9
    assert (clusters[labels == 4] == 4).mean() > 0.9 and (clusters[labels < 3] < 3).all()
    known = [e["dataset"] for e in json.loads((second / "config.json").read_text())["extensions"]]
    assert known == [str(tmp_path / "one.npz"), both]
    with pytest.raises(RunFolderError, match="holds the same samples"):
        extend(settings(tmp_path / "one.npz", extend=str(second)))


def test_images_are_embedded_by_the_runs_teacher_and_shown(tmp_path):
    from sklearn.datasets import load_digits

    from tests.vision.test_run import save_images

    data = load_digits()
    images, labels = (data.images * 15).astype(np.uint8), data.target  # pyright: ignore
    for name, rows in (("old", slice(0, 300)), ("new", slice(300, 500))):
        for label in range(3) if name == "old" else range(4):
            folder = tmp_path / name / f"class{label}"
            save_images(folder, images[rows][labels[rows] == label], name + "{}.png")
    asked = {**FAST, "max_steps": 60, "dataset": str(tmp_path / "old"), "run_name": "old"}
    asked |= {"labels": "folders"}
    asked |= {"runs_dir": str(tmp_path / "runs"), "embeddings_dir": str(tmp_path / "e")}
    run(VisionSettings(**asked))
    given = {"extend": "old", "dataset": str(tmp_path / "new"), "runs_dir": asked["runs_dir"]}
    done = extend(inherited(VisionSettings(**given), given))
    names = [row["label"] for row in assignments(done) if row["cluster"] == "3"]
    assert names and set(names) == {"class3"}
    page = write_report(done, samples=run_samples(done)).read_text()
    assert "Cluster 3 (new) · class3" in page and "data:image/png" in page


# --- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_clusters": 4}, "N_CLUSTERS is 4, expected 3 as in"),
        ({"teacher": "dinov2"}, "TEACHER is 'dinov2', expected 'features'"),
        ({"resume": True}, "without --resume"),
    ],
)
def test_settings_that_contradict_the_run_are_refused(settings, given, message):
    with pytest.raises(SettingsError, match=message):
        settings("new.npz", **given)
    assert settings("new.npz", n_clusters=3).n_heads == FAST["n_heads"]


def changed(parent, tmp_path, name, change):
    """A copy of the run in which a JSON file says something else."""
    path = tmp_path / "changed"
    shutil.copytree(parent, path)
    found = json.loads((path / name).read_text())
    change(found)
    (path / name).write_text(json.dumps(found))
    return str(path)


OTHER = {
    "have no learns_from: another version wrote them": lambda config: config.pop("learns_from"),
    r"had other settings \(SEED\): install": lambda config: config["settings"].pop("SEED"),
    r"had other settings \(OLD\): install": lambda config: config["settings"].update(OLD=1),
}


@pytest.mark.parametrize("message", OTHER)
def test_a_run_of_another_version_is_refused(parent, settings, tmp_path, message):
    old = changed(parent, tmp_path, "config.json", OTHER[message])
    commit = json.loads((parent / "config.json").read_text())["commit"]
    with pytest.raises(RunFolderError, match=f"{message}.*") as refused:
        settings("new.npz", extend=old)
    assert f"commit {commit}" in str(refused.value)


def test_samples_and_teachers_that_do_not_fit_are_refused(parent, settings, tmp_path):
    with pytest.raises(RunFolderError, match="holds the same samples"):
        extend(settings(parent.parents[1] / "old.npz"))
    np.save(tmp_path / "wide.npy", np.ones((20, 9), np.float32))
    with pytest.raises(SettingsError, match="9 dimensions.* expects 8"):
        extend(settings(tmp_path / "wide.npy"))
    other = changed(
        parent, tmp_path, "metrics.json", lambda m: m["teacher"].update(weights="f" * 64)
    )
    new = save(tmp_path, "new.npz", range(3), 20, 1)
    with pytest.raises(RunFolderError, match="other weights"):
        extend(settings(new, extend=other))
    assert not (tmp_path / "runs").exists()


def test_a_head_named_in_a_file_is_not_imported(parent, settings, tmp_path):
    own = changed(
        parent, tmp_path, "config.json", lambda c: c["settings"].update(HEAD="evil.module.Head")
    )
    with pytest.raises(InputError, match="would execute its code.*--head evil.module.Head"):
        settings("new.npz", extend=own)
    assert settings("new.npz", extend=own, head="evil.module.Head").head == "evil.module.Head"


def test_the_command(parent, tmp_path, capsys):
    new = save(tmp_path, "new.npz", range(4), 40, 1)
    words = ["--extend", str(parent), "--dataset", new, "--run-name", "more"]
    words += ["--runs_dir", str(tmp_path / "runs"), "--embeddings_dir", str(tmp_path / "e")]
    assert train(words, config=tmp_path / "none.py") == 0
    output = capsys.readouterr().out
    assert "proposed as 1 new cluster: 3 (" in output and "report.html" in output
    assert (tmp_path / "runs" / "more" / "report.html").exists()
    assert [p.name for p in (tmp_path / "e").iterdir()][0].startswith("extend-")
    assert train(words, config=tmp_path / "none.py") == 2
    assert "already holds a finished run" in capsys.readouterr().err
    words = ["other" if word == "more" else word for word in words]
    assert train([*words, "--n_clusters", "7"], config=tmp_path / "none.py") == 2
    assert "N_CLUSTERS is 7, expected 3 as in" in capsys.readouterr().err


def test_an_occupied_folder_is_refused_unless_a_kill_left_it(parent, settings, tmp_path):
    asked = settings(save(tmp_path, "new.npz", range(4), 40, 1), run_name="more")
    place = tmp_path / "runs" / "more"
    place.parent.mkdir(exist_ok=True)
    place.write_text("mine")
    with pytest.raises(RunFolderError, match=f"{place} already holds"):
        extend(asked)
    assert [path.name for path in place.parent.iterdir()] == ["more"]
    place.unlink()
    place.mkdir()
    (place / ".lock").touch()
    assert extend(asked) == place and (place / "metrics.json").is_file()


# --- Kills --------------------------------------------------------------------------------------


def extend_in(folder, asked):
    """Extend into this folder, unless that was done."""
    if not whole(folder):
        change = {"RUNS_DIR": str(folder), "EMBEDDINGS_DIR": str(folder / "e")}
        extend(VisionSettings.from_dict(asked | change))


def whole(folder):
    """The runs that are there: each of them has every file."""
    found = {p for p in folder.glob("[!.]*") if p.name not in ("e", "latest")}
    names = {"config.json", "metrics.json", "model.safetensors", "assignments.csv", "arrays.npz"}
    names.add(SOURCES)
    assert all(names == {file.name for file in path.iterdir()} for path in found)
    return {path.name for path in found}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_extension_shows_no_partial_run_and_can_be_repeated(settings, tmp_path, kills):
    asked = settings(save(tmp_path, "new.npz", range(4), 40, 1), run_name="more")
    found = kill_again_and_again(extend_in, whole, tmp_path / "k", asked.to_dict(), kills=kills)
    assert found.kills == kills
    for path in found.folders:
        assert whole(path) == {"more"}
        assert [p.name for p in (path / ".extending").iterdir()] == [".lock"]
        for name in ("assignments.csv", "model.safetensors"):
            same = [(folder / "more" / name).read_bytes() for folder in (path, found.straight)]
            assert same[0] == same[1]


# --- The test itself ----------------------------------------------------------------------------


def test_false_alarms_are_as_rare_as_the_level_of_the_test():
    alarms = 0
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(400, 5, generator=g)
        clusters = (x[:, 0] > 0).long()
        groups = find_new_clusters(x[:300], clusters[:300], x[300:], clusters[300:])
        alarms += bool((groups >= 0).any())
    assert alarms <= 1  # expected: less than one


def test_new_groups_are_sorted_by_size_and_small_ones_omitted():
    g = torch.Generator().manual_seed(0)
    old = torch.randn(400, 5, generator=g)
    far = [30 * torch.eye(5)[i] + torch.randn(n, 5, generator=g) for i, n in enumerate([30, 60, 4])]
    new = torch.cat([torch.randn(100, 5, generator=g), *far])
    groups = find_new_clusters(old, torch.zeros(400).long(), new, torch.zeros(194).long())
    assert (groups[:100] == -1).all() and (groups[190:] == -1).all()
    assert (groups[100:130] == 1).all() and (groups[130:190] == 0).all()


def test_awkward_batches_are_extended_by_too(parent):
    model = ClusterModel.from_pretrained(parent)
    far = torch.from_numpy(blobs([3], 40, 1)[0])
    for x in (far[:1], far[:4], torch.zeros(30, 8)):
        assert model.extended(x.__getitem__, len(x)) is model
    grown = model.extended(far.__getitem__, len(far))
    assert grown.predict_proba(far[:0]).shape == (0, 4) and len(grown.outlier_scores(far[:0])) == 0
    x = far.clone().requires_grad_()
    grown(x).sum().backward()  # its tensors are ordinary ones
    assert grown.extended(far.__getitem__, len(far)) is grown  # known by now


def test_no_more_new_samples_of_a_cluster_are_compared_than_there_are_old_ones():
    old = torch.tensor([0] * 3 + [1] * 50)
    joined = torch.tensor([0, 1] * 40 + [2] * 5)
    rows = comparable(old, joined)
    assert joined[rows].bincount().tolist() == [3, 40]
    assert rows.tolist() == sorted(set(rows.tolist()))


def test_an_extension_keeps_the_black_and_white_of_the_run(tmp_path):
    """The values have 12 of 16 bits, and the new pictures are darker than all before."""
    places = {"runs_dir": str(tmp_path / "runs"), "embeddings_dir": str(tmp_path / "cache")}
    quick = {"n_clusters": 3, "n_heads": 4, "max_steps": 20, "baselines": False, "image_size": 8}
    drawn = np.random.default_rng(0).integers(0, 17, (40, 8, 8))
    for name, scale in (("first", 240), ("darker", 48)):
        (tmp_path / name).mkdir()
        for i, pixels in enumerate(drawn):
            values = (pixels * scale).astype(np.uint16)
            Image.fromarray(values).save(tmp_path / name / f"{i}.png")
    settings = VisionSettings(dataset=str(tmp_path / "first"), run_name="a", **quick, **places)
    first = run(settings)
    more = settings.replace(dataset=str(tmp_path / "darker"), run_name="b", extend=str(first))
    extended = Samples(extend(inherited(more, {})))
    levels = {"integers": [0.0, 4095.0], "floats": None}
    assert extended.metrics["dataset"]["levels"] == levels
    of_run, new = (np.asarray(extended.image(row)).astype(float) for row in (3, 43))
    assert of_run.max() == pytest.approx(255 * drawn[3].max() * 240 / 4095, abs=0.6)
    np.testing.assert_allclose(new, of_run / 5, atol=1)
