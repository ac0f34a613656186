"""Tables of texts or sounds, and folders of sounds."""

import io
import json
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import csv, parquet
from scipy.io import wavfile

from ssl_kd.core.errors import InputError
from ssl_kd.vision.data import FeatureDataset, UnreadableSample, open_dataset
from ssl_kd.vision.data.catalog import open_rows
from ssl_kd.vision.data.sounds import READ, SoundFolder, read_sound, resampled
from tests.tiny_encoders import tone

TEXTS = ["a good film", 'dull,\n"very" dull', "  fine ", "", "<b>great</b>", "so-so"]
LABELS = ["good", "bad", "good", "bad", "good", "bad"]
CONTENT = arrow.table({"body": TEXTS, "stars": [5, 1, 4, 2, 5, 3], "label": LABELS})


def write_table(folder, suffix):
    path = folder / f"reviews{suffix}"
    if suffix == ".parquet":
        parquet.write_table(CONTENT, path)
    elif suffix in (".jsonl", ".ndjson"):
        path.write_text("\n".join(map(json.dumps, CONTENT.to_pylist())), encoding="utf-8")
    else:
        separator = "\t" if suffix == ".tsv" else ","
        csv.write_csv(CONTENT, path, csv.WriteOptions(delimiter=separator))
    return str(path)


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"])
def test_a_column_of_texts_is_a_data_set(tmp_path, suffix):
    data: Any = open_dataset(write_table(tmp_path, suffix), "train", column="body")
    assert data.kind == "text" and len(data) == 6 and not data.pictured
    assert [data.sample(i) for i in (0, 1, 2, 4)] == [TEXTS[0], TEXTS[1], "fine", TEXTS[4]]
    with pytest.raises(UnreadableSample, match="3: the text is empty"):
        data.sample(3)
    assert data.labels.tolist() == [1, 0, 1, 0, 1, 0] and data.class_names == ("bad", "good")
    used = "6 texts; labels from column label; texts from column body; shown only: stars; 2 classes"
    assert data.usage.used == used
    columns = open_rows(data.name, "train", column="body", media=None).columns()
    assert columns["stars"].to_pylist() == [5, 1, 4, 2, 5, 3]


def test_the_fingerprint_is_of_the_texts(tmp_path):
    names = [write_table(tmp_path, suffix) for suffix in (".csv", ".jsonl", ".parquet")]
    first, *others = (open_dataset(name, "train", column="body").fingerprint for name in names)
    assert all(other == first for other in others)
    changed = arrow.table({"body": [*TEXTS[:5], "so so"]})
    csv.write_csv(changed, tmp_path / "reviews.csv")
    assert open_dataset(names[0], "train", column="body").fingerprint != first


def test_a_column_called_text_is_found_and_others_are_suggested(tmp_path):
    csv.write_csv(arrow.table({"text": TEXTS, "n": range(6)}), tmp_path / "a.csv")
    assert open_dataset(str(tmp_path / "a.csv"), "train").kind == "text"
    with pytest.raises(
        InputError, match=r"or a column of pictures, or of texts, such as --column b"
    ):
        open_dataset(write_table(tmp_path, ".csv"), "train")
    with pytest.raises(InputError, match="no column 'bodi'.*; did you mean 'body'"):
        open_dataset(write_table(tmp_path, ".csv"), "train", column="bodi")
    with pytest.raises(
        InputError, match="COLUMN is 'stars', whose type in .* is int64; expected li"
    ):
        open_dataset(write_table(tmp_path, ".csv"), "train", column="stars")


def test_features_come_before_texts(tmp_path):
    content = arrow.table({"text": TEXTS, "x": [[1.0, i] for i in range(6)]})
    parquet.write_table(content, tmp_path / "f.parquet")
    assert isinstance(open_dataset(str(tmp_path / "f.parquet"), "train"), FeatureDataset)
    assert open_dataset(str(tmp_path / "f.parquet"), "train", column="text").kind == "text"


def test_a_test_split_of_texts_lies_beside_the_train_split(tmp_path):
    for split in ("train", "test"):
        csv.write_csv(CONTENT, tmp_path / f"reviews_{split}.csv")
    name = str(tmp_path / "reviews_train.csv")
    test = open_dataset(name, "test", column="body")
    assert test.kind == "text" and test.class_names == ("bad", "good")


def test_files_that_are_no_tables_are_refused_in_one_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("text\nfür\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"column 'text' of .*a\.csv is not UTF-8: save the file"):
        open_dataset(str(path), "train")
    for name, content in (("b.jsonl", b'{"text": "a"}\n{"te'), ("c.csv", b"a,b\n1,2\n3\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name} cannot be read as a .* file: ") as error:
            open_dataset(str(tmp_path / name), "train")
        assert "\n" not in str(error.value)


# --- sounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.float64])
def test_all_formats_of_wav_give_the_same_sound(tmp_path, dtype):
    expected = tone(440, 0.1)
    values = expected
    if dtype == np.uint8:
        values = np.round(expected * 127 + 128)
    elif np.issubdtype(dtype, np.integer):
        values = np.round(expected.astype(np.float64) * np.iinfo(dtype).max)
    wavfile.write(tmp_path / "a.wav", 16_000, values.astype(dtype))
    sound = read_sound(tmp_path / "a.wav", "a")
    assert sound.rate == 16_000 and sound.samples.dtype == np.float32
    tolerance = 0.01 if dtype == np.uint8 else 1e-4
    np.testing.assert_allclose(sound.samples, expected, atol=tolerance)
    content = io.BytesIO((tmp_path / "a.wav").read_bytes())
    assert np.array_equal(read_sound(content, "a").samples, sound.samples)


def test_channels_are_averaged(tmp_path):
    left, right = tone(440, 0.1), tone(880, 0.1, seed=1)
    wavfile.write(tmp_path / "a.wav", 8000, np.stack([left, right], 1))
    sound = read_sound(tmp_path / "a.wav", "a")
    np.testing.assert_allclose(sound.samples, (left + right) / 2, atol=1e-6)
    assert len(resampled(sound, 16_000)) == 2 * len(left)


def test_resampling_keeps_a_tone_and_removes_what_the_new_rate_cannot_hold(tmp_path):
    def level(hertz):
        wavfile.write(tmp_path / "a.wav", 44_100, tone(hertz, 1.0, 44_100))
        samples = resampled(read_sound(tmp_path / "a.wav", "a"), 16_000)
        assert len(samples) == 16_000
        return float(np.abs(samples[1000:-1000]).max())

    assert 0.25 < level(440) < 0.4 and level(12_000) < 0.06


def test_bad_sounds_say_why(tmp_path):
    wavfile.write(tmp_path / "empty.wav", 8000, np.zeros(0, np.int16))
    wavfile.write(tmp_path / "nan.wav", 8000, np.full(9, np.nan, np.float32))
    (tmp_path / "cut.wav").write_bytes(b"RIFF1234")
    reasons = {
        "empty": "the sound is empty",
        "nan": "contains NaN or infinity",
        "cut": "(Not a WAV|Format not)",
    }
    for name, reason in reasons.items():
        with pytest.raises(UnreadableSample, match=f"mine: .*{reason}"):
            read_sound(tmp_path / f"{name}.wav", "mine")
    with pytest.raises(UnreadableSample, match="mine: No such file"):
        read_sound(tmp_path / "none.wav", "mine")


def sounds(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        wavfile.write(folder / name, 8000, tone(300, 0.1, 8000))
    return str(folder)


def test_a_folder_of_sounds(tmp_path):
    name = sounds(tmp_path, "cat/1.wav", "dog/2.WAV", "dog/3.wav", ".hidden.wav")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "4.aiff").write_bytes(b"x")
    data: Any = open_dataset(name, "train", labels="folders")
    assert isinstance(data, SoundFolder) and data.kind == "audio"
    assert list(data.ids) == ["cat/1.wav", "dog/2.WAV", "dog/3.wav"]
    assert data.labels.tolist() == [0, 1, 1] and data.usage.used == "3 sounds of 2 classes"
    assert list(map(str, data.left_out)) == [
        "1 file .aiff (4.aiff): convert them to WAV, with ffmpeg",
        "1 other file: no sounds: 1 .txt",
        "1 hidden (.hidden.wav): names that begin with a dot are skipped",
    ]
    assert data.sample(1).rate == 8000 and data.sound(0)[0] == "audio/wav"
    assert open_dataset(name, "train").class_names is None


def test_a_folder_of_sounds_with_splits(tmp_path):
    name = sounds(tmp_path, "train/cat/1.wav", "train/dog/2.wav", "test/dog/3.wav", "extra/4.wav")
    train: Any = open_dataset(name, "train", labels="folders")
    test: Any = open_dataset(name, "test", labels="folders")
    assert list(train.ids) == ["cat/1.wav", "dog/2.wav"] and list(test.ids) == ["dog/3.wav"]
    assert test.labels.tolist() == [1]
    assert str(train.left_out[0]).startswith("1 sound in extra/: the splits are ")


def test_images_beside_sounds_are_what_is_read(tmp_path):
    from PIL import Image

    sounds(tmp_path, "1.wav")
    Image.new("L", (4, 4)).save(tmp_path / "2.png")
    data: Any = open_dataset(str(tmp_path), "train")
    assert data.kind == "image" and str(data.left_out[0]) == "1 other file: no images: 1 .wav"


@pytest.mark.skipif(".flac" in READ, reason="soundfile reads FLAC here")
def test_sounds_that_need_soundfile_name_it(tmp_path):
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    with pytest.raises(
        InputError, match=r"no sound in .*1 file \.flac \(a\.flac\): pip install so"
    ):
        open_dataset(str(tmp_path), "train")
    with pytest.raises(UnreadableSample, match="pip install soundfile to read FLAC, OGG and MP3"):
        read_sound(tmp_path / "a.flac", "a")


@pytest.mark.parametrize("suffix", [".flac", ".ogg"])
def test_compressed_sounds_are_read_by_soundfile(tmp_path, suffix):
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    left, right = (tone(hertz, 0.5, 22_050) for hertz in (440, 880))
    written = np.stack([left, right], 1)
    soundfile.write(tmp_path / f"a{suffix}", written, 22_050)
    (tmp_path / f"broken{suffix}").write_bytes(b"fLaC no frames")
    data: Any = open_dataset(str(tmp_path), "train")
    assert isinstance(data, SoundFolder) and len(data) == 2
    sound = data.sample(0)
    assert sound.rate == 22_050 and sound.samples.shape == left.shape
    expected = written.mean(1)
    if suffix == ".flac":  # lossless, in 16 bits
        np.testing.assert_allclose(sound.samples, expected, rtol=0, atol=2 / 2**15)
    assert np.corrcoef(sound.samples, expected)[0, 1] > 0.99
    with pytest.raises(UnreadableSample, match=f"broken{suffix}"):
        data.sample(1)
    found = data.sound(0)
    assert found is not None
    kind, content = found
    assert kind == f"audio/{suffix[1:]}" and content == (tmp_path / f"a{suffix}").read_bytes()


def test_a_table_that_names_sounds(tmp_path):
    sounds(tmp_path, "clips/1.wav", "clips/2.wav")
    content = {"path": ["clips/1.wav", "clips/2.wav", "clips/3.wav"], "sentence": ["a", "b", "c"]}
    csv.write_csv(arrow.table(content), tmp_path / "clips.csv")
    data: Any = open_dataset(str(tmp_path / "clips.csv"), "train")
    assert data.kind == "audio" and data.ids[1] == "clips/2.wav"
    assert len(data.sample(1).samples) == 800 and data.file(1) == tmp_path / "clips/2.wav"
    with pytest.raises(UnreadableSample, match=r"'clips/3\.wav' is not a sound file"):
        data.sample(2)


def test_a_table_that_holds_sounds(tmp_path):
    sounds(tmp_path, "1.wav")
    cells = [{"bytes": (tmp_path / "1.wav").read_bytes(), "path": "1.wav"}] * 2
    parquet.write_table(arrow.table({"audio": cells}), tmp_path / "a.parquet")
    (tmp_path / "1.wav").unlink()
    data: Any = open_dataset(str(tmp_path / "a.parquet"), "train")
    assert data.kind == "audio" and len(data.sample(1).samples) == 800
