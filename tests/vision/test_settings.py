"""The settings of the vision mode, and the file that a user edits."""

import re
from pathlib import Path

import pytest

from ssl_kd.cli.flags import read_settings
from ssl_kd.core.settings import SettingsError
from ssl_kd.vision.settings import VisionSettings

CONFIG = Path(__file__).parents[2] / "config.py"


def test_the_config_file_is_written_from_the_declarations():
    assert CONFIG.read_text(encoding="utf-8") == VisionSettings.file_text()
    assert VisionSettings.from_file(CONFIG) == VisionSettings()


@pytest.mark.parametrize("name", VisionSettings.rules())
def test_help_names_the_range_that_the_code_checks(name):
    rule = VisionSettings.rules()[name][2]
    assert rule.help
    text = f"{rule.help} {rule.bounds}"
    numbers = {float(n) for n in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)}
    bounds = {rule.low, rule.above, rule.high, rule.below} - {None, 0}
    assert bounds <= numbers  # 0 as the lower end of a size or a share is implied


REFUSED = {
    "student_temp": [0.049],
    "teacher_temp": [0.039],
    "beta": [0.0, 1.01],
    "learning_rate": [0.0, float("nan")],
    "clip_grad": [0.0, float("inf")],
    "batch_size": [0],
    "n_clusters": [1, "many"],
    "seed": [-1],
    "teacher": ["dinov2_vitx14", "dinov", "timm:"],
    "run_name": ["../elsewhere", "latest"],
    "device": ["cuda:x"],
    "head": ["TEMIHead", "heads/mine.py"],
}
EDGES = {
    "student_temp": [0.05],
    "teacher_temp": [0.04],
    "beta": [1.0],
    "clip_grad": [None],
    "n_clusters": [None, "auto"],
    "learning_rate": [10.0],
    "teacher": ["dinov2_vitg14_reg", "timm:vit_small_patch14_dinov2.lvd142m"],
    "device": ["cuda:1"],
    "head": ["heads.cosine_head.CosineHead"],
}


@pytest.mark.parametrize(
    ("changed", "without_effect", "where"),
    [
        ({"beta": 0.8}, "BETA is 0.8", {"loss": "sharpened"}),
        ({"beta": 0.8}, "BETA is 0.8", {"cluster_sizes": "any"}),
        ({"loss": "sharpened"}, "LOSS is 'sharpened'", {"cluster_sizes": "any"}),
        ({"method": "heads"}, "METHOD is 'heads'", {"cluster_sizes": "any"}),
        ({"method": "heads"}, "METHOD is 'heads'", {"loss": "fixed"}),
        ({"instance_weight": "own"}, "INSTANCE_WEIGHT is 'own'", {"loss": "fixed"}),
    ],
)
def test_a_setting_without_effect_is_refused_with_both_ways_out(changed, without_effect, where):
    ((other, value),) = where.items()
    with pytest.raises(
        SettingsError, match=f"{without_effect}, but has no effect with {other.upper()} {value}"
    ):
        VisionSettings(**changed, **where)
    VisionSettings(**changed)
    VisionSettings(**where)


@pytest.mark.parametrize("name", REFUSED)
def test_out_of_range_is_refused_by_name_and_the_edge_is_allowed(name):
    for value in REFUSED[name]:
        with pytest.raises(SettingsError, match=f"^{name.upper()} is "):
            VisionSettings(**{name: value})
    for value in EDGES.get(name, []):
        assert getattr(VisionSettings(**{name: value}), name) == value


def test_a_sharpened_teacher_may_not_be_softer_than_its_student():
    with pytest.raises(SettingsError, match="TEACHER_TEMP is 0.2 and STUDENT_TEMP 0.1"):
        VisionSettings(loss="sharpened", teacher_temp=0.2, student_temp=0.1)
    VisionSettings(loss="temi", teacher_temp=0.2, student_temp=0.1)


def test_rows_per_device_are_the_batch_of_every_process(monkeypatch, tmp_path):
    """Processes share the heads, not the rows: each forms its heads' losses on whole batches."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    words = ["--per_device_train_batch_size", "16"]
    assert read_settings(VisionSettings, words, tmp_path / "no.py", prog="x").batch_size == 16
    assert VisionSettings.from_dict({"per_device_train_batch_size": 16}).batch_size == 16


OLDER = """
DATA_ROOT = "./data"
DATASET = "cifar10"
DINOV2_MODEL = "dinov2_vits14"
EMBEDDING_DIM = 384
IMG_SIZE = 224
EMBEDDING_DIR = "data/embeddings"
NUM_CLUSTERS = 10
NUM_HEADS = 50
NUM_NEIGHBORS = 50
NUM_EPOCHS = 100
BATCH_SIZE = 512
LR = 1e-4
BETA = 0.6
TEACHER_TEMPERATURE = 0.05
GRAD_CLIP = 1.0
USE_AMP = True
NUM_WORKERS = 4
LOG_INTERVAL = 10
SAVE_INTERVAL = 100
SAVE_DIR = "runs"
EXPERIMENT_NAME = "first"
RANDOM_SEED = 3
CLEAR_CACHE_EVERY_STEP = True
"""


def test_a_settings_file_with_older_names_is_read(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(OLDER)
    assert VisionSettings.from_file(path) == VisionSettings(
        data_dir="./data",
        dataset="cifar10",
        teacher="dinov2_vits14",
        embedding_dim=384,
        image_size=224,
        embeddings_dir="data/embeddings",
        n_clusters=10,
        n_heads=50,
        n_neighbors=50,
        epochs=100,
        batch_size=512,
        learning_rate=1e-4,
        teacher_temp=0.05,
        use_fp16=True,
        workers=4,
        log_every=10,
        checkpoint_every=100,
        runs_dir="runs",
        run_name="first",
        seed=3,
        clear_cache_every_step=True,
    )
    path.write_text('TEACHER = "dinov2_vitb14"\nDINOV2_MODEL = "dinov2_vits14"\n')
    with pytest.raises(SettingsError, match="TEACHER and DINOV2_MODEL are the same setting"):
        VisionSettings.from_file(path)


@pytest.mark.parametrize(
    "name",
    "WEIGHT_DECAY EMA_DECAY CENTER_MOMENTUM CHECKPOINT_DIR WARMUP_EPOCHS SCHEDULER LOG_DIR NUM_GPUS"
    " USE_TENSORBOARD WANDB_PROJECT LOCAL_CROPS_NUMBER MAX_CONSECUTIVE_NANS EARLY_STOPPING".split(),
)
def test_an_older_name_without_a_setting_names_its_replacement(name):
    with pytest.raises(SettingsError, match=rf"^There is no setting {name}\. .+\.$") as refused:
        VisionSettings.from_dict({name: 1})
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    ("teacher", "token", "width"),
    [
        ("dinov2", "class", 384),
        ("dinov2_vitb14_reg", "patch", 768),
        ("dinov2_vits14", "both", 768),
        ("dinov2", "last4", 1920),
    ],
)
def test_the_width_of_embeddings_is_checked_by_the_name_of_the_model(teacher, token, width):
    VisionSettings(teacher=teacher, token=token, embedding_dim=width)
    with pytest.raises(SettingsError) as refused:
        VisionSettings(teacher=teacher, token=token, embedding_dim=1024)
    message = str(refused.value)
    assert message.startswith(f"EMBEDDING_DIM is 1024, but the embeddings of TEACHER {teacher}")
    assert f"set EMBEDDING_DIM to {width} or None" in message
    assert message.endswith("TEACHER to a model of width 1024, such as dinov2_vitl14")
