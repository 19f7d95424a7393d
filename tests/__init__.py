"""Processes that tests start find this package, although others of the name are installed."""

import os
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PLACES = [str(_ROOT), str(_ROOT / "gen"), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PLACES)
