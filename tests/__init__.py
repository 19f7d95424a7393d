"""Processes that tests start find this package, although others of the name are installed."""

import os
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_OURS = [*sorted((_ROOT / "services").iterdir()), _ROOT / "environments", _ROOT / "gen"]
_PLACES = [str(_ROOT), *map(str, _OURS), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PLACES)
