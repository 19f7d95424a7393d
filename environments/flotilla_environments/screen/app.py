"""Screens of coloured tiles, used by the tool `computer`: clicking a tile leads to the next one.

Each screen has four tiles of different colours, in four of twelve places drawn at random, and no
text. So a policy that does not look at the picture clicks the right tile in one of twelve cases at
most, and one that clicks tiles without looking at their colour in one of four.

The data version `mixed_up` is a control: what is drawn are other tiles than those that can be
clicked. A policy that looks is then no better than one that does not.
"""

import random
import sqlite3
from functools import partial
from typing import Annotated, Any

from flotilla_environments.app import App, Call, DrawnTask, Row, TaskKind
from flotilla_environments.name_lists import Names
from flotilla_environments.screen.layout import COLOURS, HEIGHT, TILES, WIDTH, draw_tiles
from flotilla_environments.toolkit import Picture, ToolError, define_tool, tools_by_name

MIXED_UP = "mixed_up"
_ORDINALS = ("first", "second")
_STEPS = {"press": 1, "press_two": 2}

# A tile is on the screen of this number, and drawn on that one; -1: on none.
SCHEMA = """
create table tiles(id integer primary key, screen integer not null, drawn_on integer not null,
  colour text not null, left integer not null, top integer not null, width integer not null,
  height integer not null);
create table clicks(id integer primary key, screen integer not null, x integer not null,
  y integer not null, tile_id integer references tiles(id));
"""


def computer(
    db: sqlite3.Connection,
    action: Annotated[str, "screenshot or left_click"],
    coordinate: Annotated[list[int] | None, "[x, y] in pixels, for left_click"] = None,
) -> Picture:
    """Use the 128x128 screen with the mouse. Every action answers with a screenshot."""
    # Here and not above: the app is also known to processes without Pillow, which draw nothing.
    from flotilla_environments.screen.draw import draw_screen

    if action == "left_click":
        _click(db, coordinate)
    elif action != "screenshot":
        raise ToolError(f"unknown action {action!r}: use screenshot or left_click")
    screen = _current_screen(db)
    last = db.execute("select max(screen) from tiles").fetchone()[0]
    columns = ("colour", "left", "top", "width", "height")
    rows = db.execute(
        f"select {', '.join(columns)} from tiles where drawn_on = ? order by id", (screen,)
    )
    shown: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in rows]
    return Picture(draw_screen(shown, step=screen, steps=last + 1))


def _click(db: sqlite3.Connection, coordinate: list[int] | None) -> None:
    if coordinate is None or len(coordinate) != 2:
        raise ToolError("left_click needs coordinate: [x, y]")
    x, y = coordinate
    if not (0 <= x < WIDTH and 0 <= y < HEIGHT):
        raise ToolError(f"[{x}, {y}] is not on the {WIDTH}x{HEIGHT} screen")
    screen = _current_screen(db)
    hit = db.execute(
        "select id from tiles where screen = ? and left <= ? and ? < left + width "
        "and top <= ? and ? < top + height",
        (screen, x, x, y, y),
    ).fetchone()
    db.execute(
        "insert into clicks(screen, x, y, tile_id) values (?, ?, ?, ?)",
        (screen, x, y, hit[0] if hit else None),
    )


def _current_screen(db: sqlite3.Connection) -> int:
    """Return the number of the screen: how many tiles were clicked so far."""
    return db.execute("select count(tile_id) from clicks").fetchone()[0]


def _draw_task(names: Names, kind: str, rng: random.Random, *, mixed_up: bool) -> DrawnTask:
    del names  # tasks differ in their screens, not in names
    colours = [rng.choice(list(COLOURS)) for _ in range(_STEPS[kind])]
    ids = rng.sample(range(10, 100), 2 * TILES * len(colours))
    tiles: list[Row] = []
    targets: dict[str, int] = {}
    for screen, colour in enumerate(colours):
        targets[f"{_ORDINALS[screen]}_tile"] = ids[-1]
        for tile in draw_tiles(rng, colour):
            drawn_on = -1 if mixed_up else screen
            tiles.append({"id": ids.pop(), "screen": screen, "drawn_on": drawn_on, **tile})
        for tile in draw_tiles(rng, None) if mixed_up else ():
            tiles.append({"id": ids.pop(), "screen": -1, "drawn_on": screen, **tile})
    return DrawnTask(
        slots=dict(zip(_ORDINALS, colours, strict=False)),
        targets=targets,
        pair=("", ""),
        tables={"tiles": tiles},
    )


def _plan_clicks(task: DrawnTask) -> list[Call]:
    tiles = {row["id"]: row for row in task.tables["tiles"]}
    return [click_on(tiles[target]) for target in task.targets.values()]


def click_on(tile: Row) -> Call:
    """Make the call that clicks the middle of a tile."""
    middle = [tile["left"] + tile["width"] // 2, tile["top"] + tile["height"] // 2]
    return ("computer", {"action": "left_click", "coordinate": middle})


SCREEN = App(
    key="screen",
    schema=SCHEMA,
    tools=tools_by_name(define_tool(computer, read_only=False, idempotent=False)),
    kinds={
        "press": TaskKind(
            ("Click the {first} tile.", "Press {first}.", "Choose the tile that is {first}."),
            _plan_clicks,
        ),
        "press_two": TaskKind(
            (
                "Click the {first} tile, then the {second} tile.",
                "Press {first}, then {second}.",
                "First choose the tile that is {first}, then the one that is {second}.",
            ),
            _plan_clicks,
        ),
    },
    draw=partial(_draw_task, mixed_up=False),
    modality="computer_use",
    other_versions={MIXED_UP: partial(_draw_task, mixed_up=True)},
)
