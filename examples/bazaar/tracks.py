"""The tracks that the site sells.

Short melodies as WAV files, made in a moment with the standard library.

Each has the same bytes on every machine, so a player can verify every range.
"""

from __future__ import annotations

import array
import functools
import io
import math
import sys
import wave
from dataclasses import dataclass
from typing import Final

_RATE: Final = 16_000
_NOTE_SAMPLES: Final = _RATE // 4
_LOUDEST: Final = 9_000


@dataclass(frozen=True, slots=True)
class Track:
    """One track; `melody` is in semitones over `base_hz`, four notes a second."""

    name: str
    title: str
    artist: str
    base_hz: float
    melody: tuple[int, ...]

    @property
    def key(self) -> str:
        """Where it is stored in `media`."""
        return f"tracks/{self.name}.wav"

    @property
    def cover_key(self) -> str:
        """Where its cover is stored in `media`."""
        return f"covers/{self.name}.jpg"

    @property
    def lasts_s(self) -> int:
        """How long it plays."""
        return len(self.melody) * _NOTE_SAMPLES // _RATE

    def data(self) -> bytes:
        """The WAV file: one channel, 16 bits."""
        return _wav(self.base_hz, self.melody)


TRACKS: Final = (
    Track("market-morning", "Market morning", "The Stalls", 261.63, (0, 4, 7, 12, 7, 4, 5, 9) * 8),
    Track("old-bicycle", "Old bicycle", "Two Wheels", 220.0, (0, 3, 7, 10, 12, 10, 7, 3) * 8),
    Track("last-bus", "Last bus home", "Night Line", 174.61, (0, 7, 12, 16, 14, 12, 7, 4) * 8),
    Track("harbour-lights", "Harbour lights", "Low Tide", 196.0, (0, 7, 9, 7, 4, 7, 2, -3) * 8),
    Track("north-window", "North window", "Paper Moon", 246.94, (0, 5, 9, 12, 14, 12, 9, 5) * 8),
    Track("second-gear", "Second gear", "Motor Mila", 146.83, (0, 0, 7, 5, 12, 0, 10, 7) * 8),
)


def track_named(name: str) -> Track | None:
    """The track of that name."""
    return next((track for track in TRACKS if track.name == name), None)


@functools.cache
def _wav(base_hz: float, melody: tuple[int, ...]) -> bytes:
    notes = {step: _note(base_hz * 2 ** (step / 12)) for step in set(melody)}
    samples = array.array("h")
    for step in melody:
        samples += notes[step]
    if sys.byteorder == "big":
        samples.byteswap()
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def _note(hz: float) -> array.array[int]:
    # A plucked string, more or less: loud at once, then fading, with one overtone; silent at both
    # ends.
    note = array.array("h")
    for index in range(_NOTE_SAMPLES):
        at_s = index / _RATE
        swell = min(1.0, index / 80, (_NOTE_SAMPLES - index) / 400) * math.exp(-5 * at_s)
        turn = 2 * math.pi * hz * at_s
        note.append(round(_LOUDEST * swell * (math.sin(turn) + 0.3 * math.sin(2 * turn))))
    return note
