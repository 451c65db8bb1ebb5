"""A small drawing board: shapes in units of a photo of 800 x 600, drawn twice as large.

Everything is computed, so the repository needs no picture: walls are gradients, shadows and lights
are blurred masks, and shapes are Pillow's. Shrinking the board smooths all edges.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageDraw, ImageFilter, ImageOps

WIDTH: Final = 800
HEIGHT: Final = 600
SCALE: Final = 2
_SOFT: Final = 8
"""Masks of shadows and lights are drawn so many times smaller, which is much cheaper to blur."""
Color = tuple[int, int, int]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Paint:
    """A color with the name that adverts call it by."""

    name: str
    color: Color


PAINTS: Final = (
    Paint("terracotta", (198, 104, 72)),
    Paint("sage", (134, 155, 121)),
    Paint("mustard", (217, 165, 62)),
    Paint("teal", (46, 122, 128)),
    Paint("navy", (46, 68, 104)),
    Paint("blush", (217, 150, 150)),
    Paint("cherry", (168, 48, 58)),
    Paint("cream", (226, 212, 184)),
)
WALLS: Final[tuple[tuple[Color, Color], ...]] = (
    ((238, 230, 216), (214, 199, 178)),
    ((205, 216, 214), (168, 186, 186)),
    ((228, 205, 188), (203, 168, 146)),
    ((196, 204, 220), (158, 170, 194)),
    ((222, 216, 196), (190, 188, 158)),
)
FLOORS: Final[tuple[Color, ...]] = (
    (176, 137, 98),
    (150, 118, 90),
    (196, 172, 140),
    (120, 104, 92),
    (168, 150, 132),
)


def shade(color: Color, factor: float) -> Color:
    """The color made darker (below 1) or lighter (above 1)."""
    hue, light, depth = colorsys.rgb_to_hls(*(part / 255 for part in color))
    red, green, blue = colorsys.hls_to_rgb(hue, min(0.97, light * factor), depth)
    return round(red * 255), round(green * 255), round(blue * 255)


class Board:
    """A picture that is being drawn. All positions are in units of 800 x 600."""

    def __init__(self, top: Color, bottom: Color) -> None:
        """Begin with a gradient from `top` to `bottom`."""
        size = (WIDTH * SCALE, HEIGHT * SCALE)
        slope = Image.linear_gradient("L").resize(size)
        self.image = ImageOps.colorize(slope, top, bottom)
        self._draw = ImageDraw.Draw(self.image)

    def poly(self, points: Sequence[Point], color: Color) -> None:
        """A filled polygon."""
        self._draw.polygon([(x * SCALE, y * SCALE) for x, y in points], fill=color)

    def line(self, points: Sequence[Point], color: Color, width: float) -> None:
        """A line of this width with round joints and ends."""
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        self._draw.line(scaled, fill=color, width=max(1, round(width * SCALE)), joint="curve")
        for x, y in (points[0], points[-1]):
            self.dot(x, y, width / 2, color)

    def dot(self, x: float, y: float, radius: float, color: Color) -> None:
        """A filled circle."""
        self.oval((x - radius, y - radius, x + radius, y + radius), color)

    def oval(self, box: tuple[float, float, float, float], color: Color) -> None:
        """A filled ellipse in `box`."""
        self._draw.ellipse([at * SCALE for at in box], fill=color)

    def ring(self, x: float, y: float, radius: float, color: Color, width: float) -> None:
        """A circle's line."""
        box = [(x - radius) * SCALE, (y - radius) * SCALE, (x + radius) * SCALE]
        self._draw.ellipse(
            [*box, (y + radius) * SCALE], outline=color, width=max(1, round(width * SCALE))
        )

    def rect(
        self, box: tuple[float, float, float, float], color: Color, *, round_by: float = 0
    ) -> None:
        """A filled rectangle, with rounded corners."""
        self._draw.rounded_rectangle(
            [at * SCALE for at in box], radius=round_by * SCALE, fill=color
        )

    def arc(
        self,
        box: tuple[float, float, float, float],
        angles: tuple[float, float],
        color: Color,
        width: float,
    ) -> None:
        """A part of an ellipse's line, clockwise in degrees from three o'clock."""
        scaled = [at * SCALE for at in box]
        self._draw.arc(scaled, *angles, fill=color, width=max(1, round(width * SCALE)))

    def shadow(self, box: tuple[float, float, float, float], strength: float = 0.45) -> None:
        """A soft dark ellipse, as under a thing that stands on a floor."""
        self._soft(box, (30, 24, 20), strength, blur=2.2)

    def light(self, x: float, y: float, radius: float, strength: float = 0.6) -> None:
        """A warm glow around a point."""
        box = (x - radius, y - radius, x + radius, y + radius)
        self._soft(box, (255, 226, 160), strength, blur=radius / _SOFT / 2.4)

    def floor(self, y: float, color: Color) -> None:
        """A floor from `y` down, lighter in front, with boards and a skirting."""
        steps = 12
        for step in range(steps):
            above = y + (HEIGHT - y) * step / steps
            tone = shade(color, 0.86 + 0.22 * step / steps)
            self.rect((0, above, WIDTH, HEIGHT), tone)
        for x in range(-8, 10):
            foot = (WIDTH / 2 + x * 190, HEIGHT)
            self.line([(WIDTH / 2 + x * 96, y), foot], shade(color, 0.8), 0.8)
        self.rect((0, y - 9, WIDTH, y), shade(color, 1.45))

    def view(self, *, is_near: bool) -> Image.Image:
        """The photo: the whole board, or the middle of it from nearby, seen in a mirror."""
        size = (WIDTH, HEIGHT)
        if not is_near:
            return self.image.reduce(SCALE)
        near = self.image.crop((330, 280, 1330, 1030)).resize(size, Image.Resampling.LANCZOS)
        return ImageOps.mirror(near)

    def _soft(
        self, box: tuple[float, float, float, float], color: Color, strength: float, *, blur: float
    ) -> None:
        mask = Image.new("L", (WIDTH // _SOFT, HEIGHT // _SOFT))
        ImageDraw.Draw(mask).ellipse([at / _SOFT for at in box], fill=round(255 * strength))
        mask = mask.filter(ImageFilter.GaussianBlur(blur))
        full = mask.resize(self.image.size, Image.Resampling.BILINEAR)
        self.image.paste(color, (0, 0), full)
