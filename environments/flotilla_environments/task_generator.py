"""Tasks by data id: draws the whole task that a data id such as `train-000123` names.

Splits: `train` is what RL trains on; `heldout` has pairs of names that neither training nor
demonstrations contain; `unseen_names` has such pairs made of names that RL never trains on;
`demo` is for demonstrations to a model that starts from nothing, and uses every name."""

import random
import re
from datetime import date, timedelta
from typing import Literal

from flotilla_environments.app import App, Scenario
from flotilla_environments.booking.app import BOOKING
from flotilla_environments.gsm8k.data_ids import SINGLE_TURN_KEYS, question_scenario
from flotilla_environments.name_lists import Names, Pool
from flotilla_environments.screen.app import SCREEN
from flotilla_environments.shop.app import SHOP
from flotilla_environments.tracker.app import TRACKER

__all__ = [
    "ALL_APPS",
    "APPS",
    "DATA_VERSION",
    "SPLITS",
    "Scenario",
    "Split",
    "draw_scenario",
    "make_data_id",
]

Split = Literal["train", "heldout", "unseen_names", "demo"]

# The apps of tasks that need no picture, and all apps.
APPS: dict[str, App] = {app.key: app for app in (BOOKING, TRACKER, SHOP)}
ALL_APPS: dict[str, App] = {**APPS, SCREEN.key: SCREEN}
DATA_VERSION = "v1"
SPLITS: dict[str, tuple[Pool, bool]] = {  # names, and whether the pairs are the held-out ones
    "train": ("train", False),
    "heldout": ("train", True),
    "unseen_names": ("novel", True),
    "demo": ("all", False),
}
_DATA_ID = re.compile(rf"({'|'.join(SPLITS)})-(\d{{6,9}})")
_FIRST_DAY = date(2026, 1, 1)


def make_data_id(split: Split, index: int) -> str:
    """Make a data id. Raises `ValueError` for an unknown split or an index out of range."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}")
    if not 0 <= index < 10**9:
        raise ValueError(f"index {index} is out of range: use 0 to 999999999")
    return f"{split}-{index:06d}"


def draw_scenario(env_key: str, data_id: str, data_version: str = "v1") -> Scenario:
    """Draw the scenario of a data id. Raises `ValueError` naming what is not known."""
    app = ALL_APPS.get(env_key)
    if app is None and env_key not in SINGLE_TURN_KEYS:
        known = ", ".join((*ALL_APPS, *SINGLE_TURN_KEYS))
        raise ValueError(f"Environment '{env_key}' not found: use one of {known}")
    versions = (DATA_VERSION, *(app.other_versions if app else ()))
    if data_version not in versions:
        known = " or ".join(map(repr, versions))
        raise ValueError(f"data version {data_version!r} not found: use {known}")
    if app is None:
        return question_scenario(env_key, data_id, data_version)
    match = _DATA_ID.fullmatch(data_id)
    if match is None:
        raise ValueError(
            f"data id {data_id!r} not found: use SPLIT-NUMBER with six digits or more, such as "
            f"train-000123; splits: {', '.join(SPLITS)}"
        )
    pool, heldout = SPLITS[match[1]]
    rng = random.Random(f"{env_key}/{data_id}/{data_version}")
    kind = rng.choice(list(app.kinds))
    draw = app.other_versions.get(data_version, app.draw)
    drawn = draw(Names(rng, env_key, pool, heldout), kind, rng)
    prompt = rng.choice(app.kinds[kind].phrasings).format(**drawn.slots)
    return Scenario(
        slots=drawn.slots,
        targets=drawn.targets,
        pair=drawn.pair,
        tables=drawn.tables,
        env_key=env_key,
        data_id=data_id,
        data_version=data_version,
        kind=kind,
        prompt=prompt,
        variables=_draw_variables(rng),
    )


def _draw_variables(rng: random.Random) -> dict[str, str]:
    """Draw Fleet's runtime context: the day, and the operator who uses the tools."""
    name = rng.choice(("Robin", "Sasha", "Toni", "Kai"))
    return {
        "CURRENT_DATE": (_FIRST_DAY + timedelta(days=rng.randrange(365))).isoformat(),
        "LOGGED_IN_USER": f"{name.lower()}@flotilla.test",
        "LOGGED_IN_NAME": name,
    }
