import importlib.util
import math
import sys
import types

import numpy as np
import pytest
import torch
from scipy.io import wavfile
from torch import nn

from ssl_kd.core.precision import Precision
from ssl_kd.vision.data import open_dataset
from ssl_kd.vision.data.sounds import Sound, resampled
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.teachers import TeacherUnavailable, load_teacher
from ssl_kd.vision.teachers.sounds import RATE, VoiceEncoder, part_starts
from tests.tiny_encoders import audio_encoder, tone, whisper

transformers = pytest.importorskip("transformers")
CPU = Precision.for_device("cpu")
SECONDS = (0.4, 5.3, 1.6, 2.9)
SOUNDS = [Sound(tone(200 + 90 * i, s, seed=i), RATE) for i, s in enumerate(SECONDS)]


def state(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lstm, linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)
    return nn.ModuleDict({"lstm": lstm, "linear": linear}).state_dict()


def embedded(teacher, sounds):
    return teacher.embed([teacher.preprocess(sound) for sound in sounds])


# --- Resemblyzer ----------------------------------------------------------------------------------


def to_mel(hertz):
    """The scale of Slaney: linear up to 1000 Hz, then logarithmic."""
    return hertz / (200 / 3) if hertz < 1000 else 15 + math.log(hertz / 1000) / (math.log(6.4) / 27)


def from_mel(mel):
    return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


def expected_mel(samples):
    """The power in 40 triangular bands of unit area, frame by frame: [frame, mel]."""
    ends = [from_mel(mel) for mel in np.linspace(to_mel(0), to_mel(8000), 42)]
    bins, bank = np.linspace(0, 8000, 201), np.zeros((40, 201))
    for k, (low, middle, high) in enumerate(zip(ends, ends[1:], ends[2:], strict=False)):
        rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
        bank[k] = np.clip(np.minimum(rising, falling), 0, None) * 2 / (high - low)
    padded = np.pad(samples.astype(np.float64), 200)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    starts = range(0, len(padded) - 400 + 1, 160)
    power = [np.abs(np.fft.rfft(window * padded[i : i + 400])) ** 2 for i in starts]
    return np.stack(power) @ bank.T


def expected_voice(sound, tensors):
    """The embedding of a recording in float64, as Resemblyzer's paper and package define it."""
    samples = sound.samples.astype(np.float64)
    decibels = 20 * math.log10(np.sqrt(np.mean(samples**2)))
    samples *= 10 ** (max(0.0, -30 - decibels) / 20)
    n_frames = math.ceil((len(samples) + 1) / 160)
    starts = list(range(0, max(1, n_frames - 160 + 77 + 1), 77))
    if len(starts) > 1 and (len(samples) - 160 * starts[-1]) / (160 * 160) < 0.75:
        starts.pop()
    samples = np.pad(samples, (0, max(0, (starts[-1] + 160) * 160 - len(samples))))
    mel = torch.from_numpy(expected_mel(samples))
    lstm, linear = nn.LSTM(40, 256, 3, batch_first=True).double(), nn.Linear(256, 256).double()
    nn.ModuleDict({"lstm": lstm, "linear": linear}).load_state_dict(tensors)
    parts = []
    with torch.no_grad():
        for start in starts:
            last = lstm(mel[None, start : start + 160])[1][0][-1, 0]
            part = linear(last).clamp(min=0)
            parts.append(part / part.norm())
        mean = torch.stack(parts).mean(0)
        return mean / mean.norm()


def test_a_voice_is_embedded_by_the_formula_of_resemblyzer():
    teacher = VoiceEncoder(state())
    for sound, embedding in zip(SOUNDS, embedded(teacher, SOUNDS), strict=True):
        want = expected_voice(sound, state())
        torch.testing.assert_close(embedding.double(), want, rtol=0, atol=1e-5)


def test_a_quiet_recording_is_raised_and_a_loud_one_left():
    teacher, loud = VoiceEncoder(state()), SOUNDS[2]
    quiet = Sound(loud.samples * 1e-3, RATE)
    torch.testing.assert_close(
        embedded(teacher, [quiet])[0].double(), expected_voice(quiet, state()), rtol=0, atol=1e-5
    )
    louder = Sound(loud.samples * 2, RATE)
    ratio = teacher.preprocess(louder) / teacher.preprocess(loud)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 4.0))


@pytest.mark.parametrize(
    "seconds, starts",
    [(0.1, [0]), (1.6, [0]), (1.9, [0]), (2.3, [0, 77]), (4.0, [0, 77, 154, 231])],
)
def test_parts_cover_a_recording(seconds, starts):
    assert part_starts(round(seconds * RATE)) == starts


def package(folder, monkeypatch):
    """Install a package with random weights, which fails when it is imported."""
    site = folder / "site" / "resemblyzer"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("raise AssertionError('imported')")
    content = {"step": 3, "model_state": {**state(), "similarity_weight": torch.ones(1)}}
    torch.save(content, site / "pretrained.pt")
    monkeypatch.setattr(sys, "path", [str(site.parent), *sys.path])
    importlib.invalidate_caches()


def test_the_weights_are_read_from_the_package_without_importing_it(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch)
    teacher, same = load_teacher("resemblyzer"), VoiceEncoder(state())
    assert teacher.weights_id == same.weights_id and teacher.name == "resemblyzer"
    assert teacher.dim == 256
    assert torch.equal(embedded(teacher, SOUNDS), embedded(same, SOUNDS))


def test_resemblyzer_says_what_to_install(monkeypatch):
    monkeypatch.setattr("ssl_kd.vision.teachers.sounds.package_folder", lambda name: None)
    with pytest.raises(TeacherUnavailable, match="pip install --no-deps resemblyzer"):
        load_teacher("resemblyzer")


def test_sounds_of_a_folder_are_embedded_and_bad_ones_named(tmp_path, caplog):
    folder = tmp_path / "sounds"
    for i, sound in enumerate(SOUNDS):
        path = folder / "ab"[i % 2] / f"{i}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        wavfile.write(path, RATE, sound.samples)
    wavfile.write(folder / "a" / "silent.wav", RATE, np.zeros(RATE, np.int16))
    (folder / "b" / "broken.wav").write_bytes(b"RIFF1234")
    data, teacher = open_dataset(str(folder), "train", labels="folders"), VoiceEncoder(state())
    options = {"split": "train", "precision": CPU, "batch_size": 3}
    store = Extraction(data, teacher, tmp_path / "cache", **options).store()
    assert list(store.ids) == ["a/0.wav", "a/2.wav", "b/1.wav", "b/3.wav"]
    assert store.labels.tolist() == [0, 0, 1, 1] and store.class_names == ("a", "b")
    order = [SOUNDS[i] for i in (0, 2, 1, 3)]
    torch.testing.assert_close(store.tensor(), embedded(teacher, order), rtol=0, atol=1e-6)
    left_out = {entry["id"]: entry["reason"] for entry in store.manifest["unreadable"]}
    assert left_out["a/silent.wav"] == "it is silent" and "b/broken.wav" in left_out
    assert "unreadable sound left out: a/silent.wav: it is silent" in caplog.text


@pytest.mark.slow
def test_the_voice_encoder_equals_the_package(monkeypatch):
    """On real weights, without the package's detector of voices, which few machines can import."""
    if (
        importlib.util.find_spec("resemblyzer") is None
        or importlib.util.find_spec("librosa") is None
    ):
        pytest.skip("the packages resemblyzer and librosa are not installed")
    monkeypatch.setitem(sys.modules, "webrtcvad", types.ModuleType("webrtcvad"))
    with pytest.warns(DeprecationWarning):  # SciPy's, for an import of the package
        original = importlib.import_module("resemblyzer")
    encoder = original.VoiceEncoder("cpu", verbose=False)
    for sound, embedding in zip(SOUNDS, embedded(load_teacher("resemblyzer"), SOUNDS), strict=True):
        samples = original.normalize_volume(sound.samples, -30, increase_only=True)
        want = torch.from_numpy(encoder.embed_utterance(samples))
        torch.testing.assert_close(embedding, want, rtol=0, atol=1e-5)


# --- audio models of transformers -----------------------------------------------------------------


def hub_teacher(folder):
    return load_teacher(f"hf:{folder}", dataset=types.SimpleNamespace(kind="audio"))


def test_a_sound_is_the_mean_of_the_frames_of_its_model(tmp_path):
    teacher = hub_teacher(audio_encoder(tmp_path / "model"))
    model = transformers.AutoModel.from_pretrained(tmp_path / "model").eval()
    prepare = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "model")
    for sound, embedding in zip(SOUNDS, embedded(teacher, SOUNDS), strict=True):
        inputs = prepare(sound.samples, sampling_rate=RATE, return_tensors="pt")
        with torch.no_grad():
            want = model(inputs["input_values"]).last_hidden_state[0].mean(0)
        torch.testing.assert_close(embedding, want, rtol=0, atol=1e-6)


def test_sounds_are_heard_at_the_rate_of_the_model(tmp_path):
    teacher = hub_teacher(audio_encoder(tmp_path / "model"))
    sound = Sound(tone(300, 1.0, 44_100), 44_100)
    assert len(teacher.preprocess(sound)) == RATE
    at_rate = Sound(resampled(sound, RATE), RATE)
    assert torch.equal(embedded(teacher, [sound]), embedded(teacher, [at_rate]))


def test_whisper_hears_the_frames_of_the_sound_and_not_of_the_silence_after_it(tmp_path):
    teacher = hub_teacher(whisper(tmp_path / "model"))
    encoder = transformers.WhisperModel.from_pretrained(tmp_path / "model").get_encoder().eval()
    prepare = transformers.WhisperFeatureExtractor.from_pretrained(tmp_path / "model")
    sound = SOUNDS[2]
    inputs = prepare(sound.samples, sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        hidden = encoder(inputs["input_features"]).last_hidden_state[0]
    assert len(hidden) == 1500  # 30 seconds
    want = hidden[: math.ceil(1.6 * 50)].mean(0)
    torch.testing.assert_close(embedded(teacher, [sound])[0], want, rtol=0, atol=1e-6)


def test_a_long_sound_is_heard_in_equal_parts(tmp_path):
    teacher = hub_teacher(whisper(tmp_path / "model"))
    long = Sound(tone(300, 40.0), RATE)
    halves = [Sound(half, RATE) for half in np.split(long.samples, 2)]
    want = embedded(teacher, halves).mean(0)
    torch.testing.assert_close(embedded(teacher, [long])[0], want, rtol=0, atol=1e-6)


def test_a_sound_of_a_few_samples_is_left_out(tmp_path):
    teacher = hub_teacher(audio_encoder(tmp_path / "model"))
    with pytest.raises(ValueError, match="it has 10 samples at 16000 Hz; expected at least 400"):
        teacher.preprocess(Sound(np.ones(10, np.float32), RATE))
