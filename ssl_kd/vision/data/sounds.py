"""Read sound files as one channel of numbers, and define a folder of them."""

from __future__ import annotations

import io
import math
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssl_kd.core.errors import UnreadableSample, brief
from ssl_kd.vision.data.folders import FileFolder, why_not_read

SOUNDS = {
    ".wav": "audio/wav", ".mp3": "audio/mpeg", ".flac": "audio/flac", ".ogg": "audio/ogg",
    ".opus": "audio/ogg", ".m4a": "audio/mp4", ".aac": "audio/aac",
}  # fmt: skip
"""Suffix -> type of the files that the explorer sends to the browser as they are."""
LARGEST_SOUND = 512 << 20  # bytes
_BY_SOUNDFILE = frozenset({".flac", ".mp3", ".ogg", ".opus"})
_HAS_SOUNDFILE = find_spec("soundfile") is not None
READ = frozenset({".wav"}) | (_BY_SOUNDFILE if _HAS_SOUNDFILE else frozenset())
"""Suffixes of the sound files that can be read here, in lower case."""


class Sound(NamedTuple):
    """A sound of one channel."""

    samples: NDArray[np.float32]  # [n], in [-1, 1]
    rate: int  # samples per second


def read_sound(source: Path | io.BytesIO, id: str) -> Sound:
    """Read a sound file, or its content, as the mean of its channels.

    WAV files are read by SciPy, others (FLAC, OGG, MP3) by the package soundfile if it is
    installed.

    Raises:
        UnreadableSample: the sound cannot be read, is empty, too large or not finite.
    """
    try:
        size = source.stat().st_size if isinstance(source, Path) else source.getbuffer().nbytes
        if size > LARGEST_SOUND:
            raise UnreadableSample(id, f"it has {size:,} bytes; expected up to {LARGEST_SOUND:,}")
        content = io.BytesIO(source.read_bytes()) if isinstance(source, Path) else source
    except OSError as error:
        raise UnreadableSample(id, brief(error.strerror or error)) from error
    is_wav = content.getvalue()[:4] in (b"RIFF", b"RIFX", b"RF64")
    try:
        values, rate = _read_wav(content) if is_wav else _read_other(content)
    except Exception as error:  # a damaged file raises many types
        raise UnreadableSample(id, brief(error), is_damaged=is_wav or _HAS_SOUNDFILE) from error
    samples = values.mean(1, dtype=np.float32) if values.ndim == 2 else values.astype(np.float32)
    if not len(samples):
        raise UnreadableSample(id, "the sound is empty", is_damaged=True)
    if not np.isfinite(samples).all():
        raise UnreadableSample(id, "the sound contains NaN or infinity", is_damaged=True)
    return Sound(samples, rate)


def resampled(sound: Sound, rate: int) -> NDArray[np.float32]:
    """Return a sound at another rate, in samples per second, filtered against aliasing."""
    from scipy.signal import resample_poly

    if sound.rate == rate:
        return sound.samples
    divisor = math.gcd(sound.rate, rate)
    samples = resample_poly(sound.samples, rate // divisor, sound.rate // divisor)
    return samples.astype(np.float32)


def _read_wav(content: io.BytesIO) -> tuple[NDArray[np.floating], int]:
    from scipy.io import wavfile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wavfile.WavFileWarning)  # of chunks that are no sound
        try:
            rate, values = wavfile.read(content)
        except ValueError:
            if not _HAS_SOUNDFILE:
                raise
            content.seek(0)
            return _read_other(content)  # it knows more codecs
    if values.dtype.kind == "f":
        return values.astype(np.float32), rate
    if values.dtype == np.uint8:  # the only unsigned format
        return (values.astype(np.float32) - 128) / 128, rate
    return values.astype(np.float32) / -float(np.iinfo(values.dtype).min), rate


def _read_other(content: io.BytesIO) -> tuple[NDArray[np.floating], int]:
    if not _HAS_SOUNDFILE:
        raise ValueError("it is no WAV file; pip install soundfile to read FLAC, OGG and MP3")
    import soundfile  # pyright: ignore[reportMissingImports]

    try:
        return soundfile.read(content, dtype="float32")
    except soundfile.LibsndfileError as error:  # its text has the address of `content`
        raise ValueError(error.error_string) from error


def way_to_read(suffix: str) -> str | None:
    """Return how to use sounds with a suffix that is not read here; None for other files."""
    if suffix in _BY_SOUNDFILE and suffix not in READ:
        return "pip install soundfile to read them"
    is_other = suffix in (".m4a", ".aac", ".wma", ".aif", ".aiff")
    return "convert them to WAV, with ffmpeg" if is_other else None


class SoundFolder(FileFolder):
    """A data set of the sound files in a folder and its subfolders; see `FileFolder`."""

    kind = "audio"
    suffixes = READ
    way_to_read = staticmethod(way_to_read)

    def sample(self, i: int) -> Sound:
        """Read sound `i`; raise UnreadableSample."""
        path = self.file(i)
        if reason := why_not_read(path, self.root, follow_links=self.follows_links):
            raise UnreadableSample(self.ids[i], reason)
        return read_sound(path, self.ids[i])

    def sound(self, i: int) -> tuple[str, bytes] | None:
        """Return the type and content of a sound's file; None if it is missing or too large."""
        path = self.file(i)
        if why_not_read(path, self.root, follow_links=self.follows_links):
            return None
        if path.stat().st_size > LARGEST_SOUND:
            return None
        return SOUNDS[path.suffix.lower()], path.read_bytes()
