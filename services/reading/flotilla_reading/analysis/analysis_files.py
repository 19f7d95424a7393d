"""The files of a run's analyses: `analysis/step_N.md`, `.html` and `.json`, and `newest.*`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flotilla_common.files.durable_files import replace_file
from flotilla_common.files.json_files import read_json_object
from flotilla_common.run_folder.dump_files import ANALYSES
from flotilla_reading.analysis.documents import to_html, to_markdown

_FORMS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "json": lambda analysis: json.dumps(analysis, indent=2) + "\n",
    "md": to_markdown,
    # Last: who waits for the page finds the others too.
    "html": to_html,
}


def write_analysis(run_dir: Path, analysis: dict[str, Any]) -> list[Path]:
    """Write an analysis in each form; return the paths. `newest.*` is that of the highest step."""
    folder = run_dir / ANALYSES
    folder.mkdir(exist_ok=True)
    names = [f"step_{analysis['step']}"]
    if analysis["step"] >= _newest_step(folder):
        names.append("newest")
    written = list[Path]()
    for form, write in _FORMS.items():
        data = write(analysis).encode(errors="replace")
        for name in names:
            replace_file(folder / f"{name}.{form}", data)
        written.append(folder / f"{names[0]}.{form}")
    return written


def analysis_page(run_dir: Path) -> Path:
    """Return the path of the page of a run's newest analysis."""
    return run_dir / ANALYSES / "newest.html"


def _newest_step(folder: Path) -> int:
    """Return the step of the newest analysis; -1 if there is none, or none that can be read."""
    try:
        step = read_json_object(folder / "newest.json").get("step")
    except ValueError:
        return -1
    return step if isinstance(step, int) else -1
