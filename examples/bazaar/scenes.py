"""What the demo's photos show: eight categories, three kinds of thing in each, eight colors.

`draw(category, look)` draws look 0 to 23. The same number gives an advert its words (`words_of`),
so a photo shows what its title names.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

from examples.bazaar.drawing import FLOORS, PAINTS, WALLS, Board, Color, Point, shade

KINDS: Final = 3
LOOKS: Final = KINDS * len(PAINTS)
WOOD: Final = (132, 92, 58)
STEEL: Final = (188, 192, 196)
DARK: Final = (44, 42, 44)
GREENS: Final[tuple[Color, ...]] = ((62, 112, 74), (84, 138, 88), (48, 92, 66), (104, 150, 84))
NAMES: Final = {
    "furniture": ("sofa", "armchair", "sideboard"),
    "bikes": ("city bike", "road bike", "child's bike"),
    "cameras": ("rangefinder", "reflex camera", "instant camera"),
    "plants": ("rubber plant", "cactus", "snake plant"),
    "guitars": ("acoustic guitar", "electric guitar", "ukulele"),
    "lamps": ("table lamp", "floor lamp", "pendant lamp"),
    "books": ("stack of novels", "shelf of classics", "cookbook"),
    "cars": ("hatchback", "estate car", "camper van"),
}
CATEGORIES: Final = tuple(NAMES)


def words_of(category: str, look: int) -> tuple[str, str]:
    """The color and the name of what look number `look` of the category shows."""
    return PAINTS[look % len(PAINTS)].name, NAMES[category][look // len(PAINTS) % KINDS]


def draw(category: str, look: int) -> Board:
    """Draw it."""
    dice = random.Random(f"{category}{look}")
    color = PAINTS[look % len(PAINTS)].color
    return _SCENES[category](look // len(PAINTS) % KINDS, color, dice)


def _room(dice: random.Random, *, floor: float = 450) -> Board:
    top, bottom = dice.choice(WALLS)
    board = Board(top, bottom)
    left = dice.choice((90, 560))
    if dice.random() < 0.5:  # a picture on the wall
        board.rect((left, 70, left + 130, 190), shade(bottom, 0.62))
        board.rect((left + 9, 79, left + 121, 181), shade(top, 1.1))
        board.dot(left + 65, 126, 28, dice.choice(PAINTS).color)
        board.rect((left + 9, 150, left + 121, 181), dice.choice(PAINTS).color)
    else:  # light of a window
        board.poly(
            [(left, 60), (left + 150, 40), (left + 170, 260), (left + 20, 290)], shade(top, 1.08)
        )
    board.floor(floor, dice.choice(FLOORS))
    return board


def _draw_furniture(kind: int, color: Color, dice: random.Random) -> Board:
    board = _room(dice)
    dark, light = shade(color, 0.72), shade(color, 1.14)
    if kind == 2:
        board.shadow((120, 500, 690, 560))
        for x in (180, 600):
            board.line([(x, 480), (x + (8 if x > 400 else -8), 535)], shade(WOOD, 0.7), 12)
        board.rect((140, 310, 660, 490), WOOD, round_by=8)
        for x in (152, 322, 492):
            board.rect((x, 324, x + 156, 476), color, round_by=5)
            board.rect((x, 324, x + 156, 332), light, round_by=4)
            board.dot(x + 78, 400, 7, (222, 190, 120))
        board.rect((200, 250, 290, 310), (220, 214, 200), round_by=18)
        for x, y in ((225, 200), (250, 170), (272, 208)):
            board.line([(246, 255), (x, y)], GREENS[0], 4)
            board.oval((x - 18, y - 26, x + 18, y + 16), GREENS[1])
        return board
    wide = 250 if kind == 0 else 130
    left, right = 400 - wide, 400 + wide
    board.shadow((left - 40, 500, right + 40, 556))
    for foot in (left + 10, right - 10):
        board.line([(foot, 490), (foot, 534)], shade(WOOD, 0.7), 12)
    board.rect((left, 270, right, 480), dark, round_by=34)
    board.rect((left + 22, 262, right - 22, 420), color, round_by=28)
    seats = 3 if kind == 0 else 1
    step = (right - left - 60) / seats
    for seat in range(seats):
        at = left + 30 + seat * step
        board.rect((at + 3, 292, at + step - 3, 424), light, round_by=22)
        board.rect((at + 2, 398, at + step - 2, 462), shade(color, 1.06), round_by=18)
    board.rect((left + 10, 450, right - 10, 500), color, round_by=10)
    for x in (left - 26, right - 26):
        board.rect((x, 352, x + 52, 504), shade(color, 0.88), round_by=24)
    pillow = dice.choice([paint.color for paint in PAINTS if paint.color != color])
    x = left + 70
    board.poly([(x, 352), (x + 66, 334), (x + 84, 400), (x + 14, 414)], pillow)
    return board


def _wheel(board: Board, x: float, y: float, radius: float, *, tyre: float) -> None:
    for turn in range(14):
        angle = math.tau * turn / 14
        tip = (x + radius * math.cos(angle), y + radius * math.sin(angle))
        board.line([(x, y), tip], (170, 172, 172), 0.8)
    board.ring(x, y, radius, DARK, tyre)
    board.ring(x, y, radius - tyre, STEEL, 2.5)
    board.dot(x, y, 6, STEEL)


def _draw_bikes(kind: int, color: Color, dice: random.Random) -> Board:
    board = _room(dice, floor=470)
    radius = (104, 108, 82)[kind]
    rear, front, ground = 250.0, (560.0, 556.0, 520.0)[kind], 532.0
    axle = ground - radius
    board.shadow((rear - 90, 512, front + 100, 556))
    for x in (rear, front):
        _wheel(board, x, axle, radius, tyre=(9, 5, 12)[kind])
    crank, seat = (380.0, axle + 6), (330.0, axle - 118.0)
    head = (front - 62, axle - 132.0)
    width = (11, 9, 12)[kind]
    low = (head[0] + 8, head[1] + 46)
    top = (seat[0] + 10, seat[1] + 34)
    if kind == 0:
        board.arc((head[0] - 190, low[1] - 190, low[0] + 4, crank[1] + 4), (10, 92), color, width)
    else:
        board.line([top, head], color, width)
    for start, end in (((rear, axle), crank), (crank, seat), ((rear, axle), top), (crank, low)):
        board.line([start, end], color, width)
    fork = (head[0] - 8, head[1] - 34)
    board.line([fork, head, low, (front, axle)], shade(color, 0.85), width)
    board.rect((seat[0] - 38, seat[1] - 14, seat[0] + 30, seat[1] + 2), DARK, round_by=8)
    if kind == 1:
        board.arc((fork[0] - 2, fork[1] - 4, fork[0] + 62, fork[1] + 56), (250, 90), DARK, 8)
    else:
        board.line([fork, (fork[0] - 42, fork[1] - 22), (fork[0] - 76, fork[1] - 8)], STEEL, 8)
        board.line([(fork[0] - 52, fork[1] - 20), (fork[0] - 78, fork[1] - 6)], DARK, 12)
    board.dot(*crank, 24, shade(STEEL, 0.7))
    board.line([crank, (crank[0] + 30, crank[1] + 44)], shade(STEEL, 0.6), 7)
    board.line([(crank[0] + 16, crank[1] + 46), (crank[0] + 46, crank[1] + 44)], DARK, 8)
    if kind == 0:  # mudguards and a basket
        for x in (rear, front):
            box = (x - radius - 8, axle - radius - 8, x + radius + 8, axle + radius + 8)
            board.arc(box, (190, 310), shade(color, 0.8), 6)
        basket = [(front - 40, 262.0), (front + 76, 262), (front + 62, 340), (front - 28, 340)]
        board.poly(basket, (176, 134, 84))
        for step in range(5):
            y = 270.0 + step * 16
            board.line([(front - 38, y), (front + 72, y)], (140, 102, 60), 2)
    return board


def _draw_cameras(kind: int, color: Color, dice: random.Random) -> Board:
    board = _room(dice, floor=400)
    board.shadow((150, 470, 660, 540), 0.55)
    if kind == 2:
        board.rect((240, 190, 570, 510), (238, 232, 222), round_by=34)
        board.rect((240, 400, 570, 510), shade(color, 1.1), round_by=30)
        for step, paint in enumerate(PAINTS[:5]):
            board.rect((392 + step * 9, 190, 401 + step * 9, 400), paint.color)
        board.rect((270, 452, 540, 466), DARK, round_by=7)
        board.rect((272, 214, 346, 262), (250, 246, 226), round_by=8)
        board.dot(512, 240, 24, DARK)
        x, y, lens = 405.0, 330.0, 92.0
    else:
        board.rect((160, 250, 660, 500), color, round_by=26)
        board.rect((160, 228, 660, 306), STEEL, round_by=20)
        board.rect((160, 290, 660, 306), shade(STEEL, 0.85))
        board.rect((160, 470, 660, 500), shade(STEEL, 0.9), round_by=14)
        if kind == 1:
            board.poly([(330, 232), (368, 162), (462, 162), (500, 232)], STEEL)
            board.rect((374, 180, 456, 200), shade(color, 0.7), round_by=6)
        else:
            board.rect((470, 244, 552, 286), (40, 48, 60), round_by=6)
            board.rect((300, 250, 350, 282), (60, 66, 74), round_by=5)
        for x, wide in ((190, 66), (560, 76)):
            board.rect((x, 204, x + wide, 230), shade(STEEL, 0.8), round_by=6)
        board.dot(292, 216, 15, (190, 60, 50))
        x, y, lens = 415.0, 378.0, 112.0
    for part, tone in ((1, DARK), (0.86, shade(STEEL, 0.6)), (0.78, DARK), (0.6, (30, 38, 58))):
        board.dot(x, y, lens * part, tone)
    board.dot(x, y, lens * 0.42, (52, 70, 110))
    board.dot(x + lens * 0.1, y + lens * 0.1, lens * 0.26, (28, 34, 56))
    board.dot(x - lens * 0.2, y - lens * 0.22, lens * 0.13, (190, 206, 232))
    return board


def _leaf(board: Board, at: Point, angle: float, size: float, color: Color) -> None:
    along = (math.cos(angle), math.sin(angle))
    across = (-along[1], along[0])
    edge = []
    for step in range(17):
        part = step / 16
        wide = math.sin(math.pi * part**0.8) * size * 0.3
        edge.append((part * size, wide))
    outline = edge + [(far, -wide) for far, wide in reversed(edge)]
    points = [
        (at[0] + along[0] * far + across[0] * wide, at[1] + along[1] * far + across[1] * wide)
        for far, wide in outline
    ]
    board.poly(points, color)
    tip = (at[0] + along[0] * size * 0.94, at[1] + along[1] * size * 0.94)
    board.line([at, tip], shade(color, 1.25), 2)


def _draw_plants(kind: int, color: Color, dice: random.Random) -> Board:
    board = _room(dice, floor=480)
    board.shadow((270, 520, 540, 566))
    if kind == 0:
        for step in range(11):
            foot = (400 + dice.uniform(-6, 6), 360 - step * 20.0)
            angle = -math.pi / 2 + (1 if step % 2 else -1) * dice.uniform(0.5, 1.15)
            _leaf(board, foot, angle, 150 - step * 5, dice.choice(GREENS))
        board.line([(400, 390), (398, 140)], (96, 84, 60), 7)
    elif kind == 1:
        tone = dice.choice(GREENS)
        for x, top, wide in ((400, 150, 96), (300, 240, 54), (500, 210, 58)):
            board.rect((x - wide / 2, top, x + wide / 2, 400), tone, round_by=wide / 2)
            for rib in range(3):
                at = x - wide / 4 + rib * wide / 4
                board.line([(at, top + 26), (at, 396)], shade(tone, 1.25), 2)
        board.rect((300, 330, 500, 372), tone, round_by=20)
        board.dot(400, 150, 16, (226, 120, 150))
        board.dot(400, 148, 8, (246, 200, 110))
    else:
        for step in range(9):
            blade = 330 + step * 17.5
            lean, top = (step - 4) * 17 + dice.uniform(-8, 8), 130 + abs(step - 4) * 28
            tone = dice.choice(GREENS)
            board.poly([(blade - 14, 410), (blade + 14, 410), (blade + lean + 4, top)], tone)
            board.line([(blade, 400), (blade + lean + 3, top + 20)], shade(tone, 1.4), 3)
    board.poly([(316, 392), (484, 392), (462, 540), (338, 540)], color)
    board.poly([(430, 392), (484, 392), (462, 540), (424, 540)], shade(color, 0.86))
    board.rect((304, 376, 496, 408), shade(color, 1.08), round_by=7)
    return board


def _draw_guitars(kind: int, color: Color, dice: random.Random) -> Board:
    board = _room(dice, floor=500)
    board.shadow((290, 530, 510, 566))
    small = 0.8 if kind == 2 else 1.0
    neck_top = 70 + (1 - small) * 170
    body = shade(color, 0.95)
    if kind == 1:
        outline = [(400 + 118 * math.cos(a), 440 + 96 * math.sin(a)) for a in _turns(40)]
        board.poly(outline, body)
        for x, y, wide in ((330, 330, 42), (466, 340, 36)):
            board.poly([(x - wide, y), (x + wide, y - 6), (x + 60, 450), (x - 60, 450)], body)
            board.dot(x, y, wide, body)
        board.poly([(350, 380), (470, 372), (496, 470), (372, 500)], (240, 236, 226))
        for y in (392, 432, 466):
            board.rect((372, y, 430, y + 14), DARK, round_by=5)
        for x, y in ((470, 440), (462, 474)):
            board.dot(x, y, 9, (214, 180, 96))
    else:
        for x, y, radius in ((400, 446, 108), (400, 330, 82)):
            board.dot(x, y + (1 - small) * 40, radius * small + 6, shade(color, 0.6))
        for x, y, radius in ((400, 446, 108), (400, 330, 82)):
            board.dot(x, y + (1 - small) * 40, radius * small, body)
        board.rect((400 - 66 * small, 330, 400 + 66 * small, 440), body)
        board.dot(400, 384, 36 * small + 4, (222, 190, 130))
        board.dot(400, 384, 34 * small, (52, 36, 28))
        board.rect((362, 470, 438, 486), (70, 46, 34), round_by=4)
    _draw_neck(board, neck_top, small=small, head_color=body if kind == 1 else (70, 46, 34))
    return board


def _draw_neck(board: Board, neck_top: float, *, small: float, head_color: Color) -> None:
    board.rect((388, neck_top + 50, 412, 384), (92, 62, 44))
    for fret in range(9):
        y = neck_top + 74 + fret * 26 * small
        board.line([(388, y), (412, y)], STEEL, 1.4)
    head = [(380.0, neck_top), (420, neck_top), (414, neck_top + 56), (386, neck_top + 56)]
    board.poly(head, head_color)
    for step in range(3):
        for x in (376, 424):
            board.dot(x, neck_top + 10 + step * 16, 5, STEEL)
    for step in range(4):
        string = 393 + step * 4.8
        board.line([(string, neck_top + 40), (string, 476)], (226, 220, 206), 0.7)


def _turns(count: int) -> list[float]:
    return [math.tau * step / count for step in range(count)]


def _draw_lamps(kind: int, color: Color, dice: random.Random) -> Board:
    top, bottom = dice.choice(WALLS)
    board = Board(shade(top, 0.55), shade(bottom, 0.66))
    board.floor(480, shade(dice.choice(FLOORS), 0.7))
    glow = (255, 240, 200)
    if kind == 2:
        board.light(400, 330, 250, 0.75)
        board.line([(400, 0), (400, 190)], DARK, 4)
        board.poly([(378, 190), (422, 190), (540, 330), (260, 330)], color)
        board.poly([(400, 190), (422, 190), (540, 330), (440, 330)], shade(color, 0.85))
        board.oval((260, 312, 540, 350), glow)
        board.oval((262, 310, 538, 338), shade(color, 0.7))
        board.dot(400, 336, 26, (255, 250, 230))
        return board
    high = 250 if kind == 0 else 190
    board.light(400, high, 250, 0.75)
    foot = 470 if kind == 0 else 540
    if kind == 0:
        board.shadow((150, 530, 650, 580), 0.6)
        board.rect((170, 470, 630, 494), WOOD, round_by=6)
        for x in (200, 588):
            board.rect((x, 494, x + 16, 590), shade(WOOD, 0.8))
        board.oval((342, 350, 458, 472), color)
        board.oval((372, 362, 412, 440), shade(color, 1.25))
    else:
        board.shadow((310, 520, 490, 560), 0.6)
        board.line([(400, 240), (400, 540)], STEEL, 7)
    board.oval((340, foot - 12, 460, foot + 10), shade(STEEL, 0.7) if kind else shade(color, 0.8))
    board.poly([(332, high - 90), (468, high - 90), (520, high + 60), (280, high + 60)], glow)
    board.poly(
        [(332, high - 90), (352, high - 90), (312, high + 60), (280, high + 60)], (250, 214, 150)
    )
    board.poly(
        [(448, high - 90), (468, high - 90), (520, high + 60), (488, high + 60)], (250, 214, 150)
    )
    board.rect((276, high + 54, 524, high + 66), color, round_by=4)
    board.rect((328, high - 96, 472, high - 86), color, round_by=4)
    return board


def _draw_books(kind: int, color: Color, dice: random.Random) -> Board:
    board = _room(dice, floor=430)
    tones = [color, *dice.sample([paint.color for paint in PAINTS], 7)]
    if kind == 0:
        board.shadow((180, 500, 640, 556))
        y = 530.0
        for tone in tones[:6]:
            left, thick = dice.uniform(190, 230), dice.uniform(42, 60)
            right = left + dice.uniform(340, 400)
            board.rect((left, y - thick, right, y), tone, round_by=6)
            board.rect((left + 22, y - thick + 6, right + 2, y - 6), (242, 234, 214))
            board.rect((left, y - thick, left + 30, y), shade(tone, 0.85), round_by=6)
            board.rect((left + 60, y - thick + 14, right - 70, y - 14), tone, round_by=3)
            y -= thick
        return board
    if kind == 1:
        board.shadow((80, 470, 720, 530))
        x = 110.0
        while x < 660:
            tone, wide = dice.choice(tones), dice.uniform(34, 62)
            top = dice.uniform(170, 250)
            board.rect((x, top, x + wide, 470), tone, round_by=4)
            board.rect((x, top + 26, x + wide, top + 36), shade(tone, 1.35))
            board.rect((x, 424, x + wide, 432), shade(tone, 1.35))
            board.rect((x + wide / 2 - 3, top + 60, x + wide / 2 + 3, 390), shade(tone, 0.7))
            x += wide + 3
        board.rect((70, 470, 730, 496), WOOD, round_by=4)
        return board
    board.shadow((250, 510, 590, 560))
    board.poly([(262, 150), (560, 130), (574, 522), (270, 536)], (240, 232, 212))
    board.poly([(250, 152), (546, 134), (558, 518), (258, 538)], color)
    board.poly([(250, 152), (282, 150), (290, 536), (258, 538)], shade(color, 0.78))
    board.rect((320, 190, 520, 250), shade(color, 1.4), round_by=6)
    board.dot(422, 370, 88, shade(color, 1.25))
    board.dot(422, 370, 70, (244, 238, 226))
    for angle in _turns(7):
        spot = (422 + 40 * math.cos(angle), 370 + 40 * math.sin(angle))
        board.dot(*spot, 17, dice.choice(tones[1:]))
    board.dot(422, 370, 18, GREENS[1])
    return board


def _draw_cars(kind: int, color: Color, dice: random.Random) -> Board:
    sky = dice.choice((((142, 190, 224), (240, 226, 200)), ((236, 168, 128), (250, 226, 190))))
    board = Board(*sky)
    board.dot(dice.uniform(130, 670), 130, 44, (255, 244, 214))
    for level, tone in ((300, (128, 150, 140)), (350, (98, 128, 104))):
        for hill in range(4):
            x, wide = hill * 260 + dice.uniform(-80, 40), dice.uniform(260, 380)
            board.oval((x - wide / 2, level, x + wide, level + 320), tone)
    board.rect((0, 470, 800, 600), (104, 104, 108))
    for x in range(-20, 800, 150):
        board.rect((x, 556, x + 80, 564), (232, 226, 210))
    board.shadow((110, 486, 700, 530), 0.6)
    roof, glass = (262, 268, 210)[kind], (52, 66, 84)
    front = (250, 250, 190)[kind]
    back = (560, 640, 660)[kind]
    body_top = 350 if kind < 2 else 330
    cabin = [(front, body_top), (front + 74, roof), (back - 56, roof), (back, body_top)]
    board.poly([(x, y) for x, y in cabin], shade(color, 0.9) if kind < 2 else (238, 232, 220))
    for left, right in ((front + 26, front + 150), (front + 166, back - 30)):
        lean = 46 if left == front + 26 else 0
        board.poly(
            [(left, body_top), (left + lean, roof + 14), (right, roof + 14), (right + 8, body_top)],
            glass,
        )
    board.rect((130, body_top, 682, 490), color, round_by=34)
    board.rect((130, 440, 682, 490), shade(color, 0.82), round_by=20)
    board.rect((140, 452, 672, 460), shade(color, 1.25))
    board.oval((128, 388, 168, 424), (255, 246, 206))
    board.rect((660, 386, 684, 424), (196, 48, 44), round_by=6)
    board.line([(front + 158, body_top + 6), (front + 158, 470)], shade(color, 0.7), 2)
    board.rect((front + 176, 384, front + 212, 392), shade(color, 0.6), round_by=4)
    for x in (240, 570):
        board.dot(x, 488, 62, shade(color, 0.5))
        board.dot(x, 490, 54, DARK)
        board.dot(x, 490, 30, STEEL)
        board.dot(x, 490, 10, DARK)
    return board


_SCENES: Final[dict[str, Callable[[int, Color, random.Random], Board]]] = {
    "furniture": _draw_furniture,
    "bikes": _draw_bikes,
    "cameras": _draw_cameras,
    "plants": _draw_plants,
    "guitars": _draw_guitars,
    "lamps": _draw_lamps,
    "books": _draw_books,
    "cars": _draw_cars,
}
