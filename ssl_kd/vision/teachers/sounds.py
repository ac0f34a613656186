"""Embed sounds: voices by Resemblyzer's encoder, others by an audio model of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssl_kd.core.errors import InputError, UnreadableSample
from ssl_kd.core.settings.import_paths import package_folder
from ssl_kd.core.shards.fingerprint import weights_id
from ssl_kd.vision.data.sounds import Sound, resampled
from ssl_kd.vision.teachers.base import Teacher, TeacherUnavailable
from ssl_kd.vision.teachers.hugging_face import WAY, loading_from_transformers, unavailable
from ssl_kd.vision.teachers.request import Request
from ssl_kd.vision.teachers.weights import read_weights

RATE = 16_000
"""Samples per second that these teachers hear."""
WINDOW = 400
"""Samples of a frame of Resemblyzer."""
HOP = 160
"""Samples between the beginnings of two frames."""
MELS = 40
"""Mel bands of a frame."""
PART = 160
"""Frames of a part of a recording: 1.6 seconds."""
STEP = 77
"""Frames between the beginnings of two parts: 1.3 parts per second."""
COVERED = 0.75
"""Share of the last part that must lie in the recording, unless it is the only one."""
LOUDNESS = -30.0
"""Decibels below full scale to which quieter recordings are raised."""
LONGEST = 30
"""Seconds of sound that an audio model hears at once."""
SHORTEST = 0.025
"""Seconds of the shortest sound that an audio model hears: about one frame."""


class VoiceEncoder(Teacher):
    """Embed a recording by who speaks: the network of Resemblyzer.

    An LSTM reads the mel spectrogram of each part of 1.6 seconds, and a linear layer maps its last
    state to an embedding `e_i`, `relu` and L2 norm included. A recording is embedded as the mean
    of its parts with L2 norm 1, `e = mean_i e_i / ||mean_i e_i||`. As in the package, a quiet
    recording is raised to -30 dB; unlike `preprocess_wav` of the package, pauses are not cut out,
    for which it needs a detector of voices.

    Args:
        state: tensors of the network, under the names in the package's file.

    References:
        Wan et al., Generalized End-to-End Loss for Speaker Verification, ICASSP 2018.
    """

    kind = "audio"

    def __init__(self, state: dict[str, Tensor]) -> None:
        from transformers.audio_utils import mel_filter_bank

        self.name = "resemblyzer"
        self.dim = 256
        self.lstm = nn.LSTM(MELS, self.dim, 3, batch_first=True)
        self.linear = nn.Linear(self.dim, self.dim)
        self.model = nn.ModuleDict({"lstm": self.lstm, "linear": self.linear})
        self.model.load_state_dict(state)
        self.model.requires_grad_(False).eval()
        self.weights_id = weights_id(self.model)
        self.transform_id = f"{MELS} mel bands at {RATE} Hz, at least {LOUDNESS:g} dB"
        n_bins = WINDOW // 2 + 1
        limits = {"min_frequency": 0.0, "max_frequency": RATE / 2, "sampling_rate": RATE}
        bank = mel_filter_bank(n_bins, MELS, **limits, norm="slaney", mel_scale="slaney")
        self.bank = torch.from_numpy(bank).float()
        self.window = torch.hann_window(WINDOW)

    def to(self, device: str | torch.device) -> VoiceEncoder:
        """Move the teacher to a device, in place."""
        super().to(device)
        self.model.to(self.device)
        return self

    def preprocess(self, image: Sound) -> Tensor:
        """Return the parts of a recording's mel spectrogram, float32 `[part, frame, mel]`."""
        samples = torch.from_numpy(resampled(image, RATE))
        power = float(samples.double().square().mean())
        if power == 0:
            raise UnreadableSample("the sound", "it is silent")
        samples = samples * max(1.0, 10 ** (LOUDNESS / 20) / math.sqrt(power))
        starts = part_starts(len(samples))
        length = (starts[-1] + PART) * HOP
        samples = F.pad(samples, (0, max(0, length - len(samples))))
        options: dict[str, Any] = {"window": self.window, "center": True, "pad_mode": "constant"}
        spectrum = torch.stft(samples, WINDOW, HOP, return_complex=True, **options)
        mel = spectrum.abs().square().T @ self.bank
        return torch.stack([mel[start : start + PART] for start in starts])

    @torch.inference_mode()
    def embed(self, batch: Sequence[Tensor]) -> Tensor:
        """Embed recordings as parts `[part, frame, mel]` each; return float32 `[sound, dim]`."""
        _, (state, _) = self.lstm(torch.cat(list(batch)).to(self.device))
        parts = F.normalize(self.linear(state[-1]).relu().float())
        means = [part.mean(0) for part in parts.split([len(sound) for sound in batch])]
        return F.normalize(torch.stack(means))


def part_starts(n_samples: int) -> list[int]:
    """Return the first frame of each part of a recording, as Resemblyzer divides it."""
    n_frames = math.ceil((n_samples + 1) / HOP)
    starts = list(range(0, max(1, n_frames - PART + STEP + 1), STEP))
    covered = (n_samples / HOP - starts[-1]) / PART
    return starts[:-1] if covered < COVERED and len(starts) > 1 else starts


class AudioEncoder(Teacher):
    """Use an audio model of transformers as a teacher: the mean of its last hidden states.

    A sound of more than 30 seconds is heard in equal parts, and each sound alone, so that no
    padding changes its embedding. Frames that only show padding, with which Whisper fills its 30
    seconds, are left out of the mean.

    Args:
        name: name of the teacher, stored in a cache of its embeddings.
        model: audio model, which is frozen and set to evaluation mode.
        prepare: feature extractor of the model.
    """

    kind = "audio"

    def __init__(self, name: str, model: nn.Module, prepare: Callable[..., Any]) -> None:
        self.name, self.prepare = name, prepare
        self.model = model.requires_grad_(False).eval()
        self.rate = int(getattr(prepare, "sampling_rate", RATE))
        self.weights_id = weights_id(model)
        self.transform_id = f"mean of all frames at {self.rate} Hz, parts of up to {LONGEST} s"
        self.dim = self.embed([torch.zeros(self.rate)]).shape[1]

    def to(self, device: str | torch.device) -> AudioEncoder:
        """Move the teacher to a device, in place."""
        super().to(device)
        self.model.to(self.device)
        return self

    def preprocess(self, image: Sound) -> Tensor:
        """Return a sound at the rate of the model, float32 `[sample]`."""
        samples = torch.from_numpy(resampled(image, self.rate))
        if len(samples) < (least := math.ceil(SHORTEST * self.rate)):
            reason = f"it has {len(samples)} samples at {self.rate} Hz; expected at least {least}"
            raise UnreadableSample("the sound", reason)
        return samples

    @torch.inference_mode()
    def embed(self, batch: Sequence[Tensor]) -> Tensor:
        """Embed sounds as samples `[sample]` each; return float32 `[sound, dim]`."""
        return torch.stack([self._embed_one(samples) for samples in batch])

    def _embed_one(self, samples: Tensor) -> Tensor:
        n_parts = math.ceil(len(samples) / (LONGEST * self.rate))
        frames = [self._frames(part) for part in samples.tensor_split(n_parts)]
        return torch.cat(frames).mean(0)

    def _frames(self, samples: Tensor) -> Tensor:
        """Return the last hidden states of a part, float32 `[frame, dim]`."""
        prepared = self.prepare(samples.numpy(), sampling_rate=self.rate, return_tensors="pt")
        name = next(n for n in ("input_values", "input_features") if n in prepared)
        hidden = self.model(**{name: prepared[name].to(self.device)}).last_hidden_state[0].float()
        n_samples = getattr(self.prepare, "n_samples", None)  # to which Whisper pads
        if n_samples is None:
            return hidden
        return hidden[: math.ceil(len(hidden) * len(samples) / n_samples)]


def load_resemblyzer(request: Request) -> VoiceEncoder:
    """Load the voice encoder from the package that carries its weights."""
    request.refuse_image_options()
    package = package_folder("resemblyzer")  # not imported: it needs more than its weights do
    if package is None:
        reason, way = "its weights are not installed", "pip install --no-deps resemblyzer"
        raise TeacherUnavailable(request.name, reason, way)
    state = read_weights(package / "pretrained.pt")
    start = "model_state."
    of_model = {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}
    layers = ("lstm.", "linear.")
    return VoiceEncoder({n: t for n, t in of_model.items() if n.startswith(layers)})


def load_audio_encoder(request: Request) -> AudioEncoder:
    """Load `hf:NAME`, an audio model from the Hub or from a local folder."""
    request.refuse_image_options()
    from transformers import AutoFeatureExtractor, AutoModel

    try:
        with loading_from_transformers():
            prepare: Any = AutoFeatureExtractor.from_pretrained(request.model)
            model: Any = AutoModel.from_pretrained(request.model, dtype=torch.float32)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        raise unavailable(request.name, error, WAY) from error
    if getattr(prepare, "sampling_rate", None) is None:
        raise InputError(f"{request.name} is no model of sounds: name one such as wav2vec 2.0")
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    return AudioEncoder(request.name, model, prepare)
