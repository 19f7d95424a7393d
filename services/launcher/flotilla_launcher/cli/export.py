"""`flotilla export`: writes the model of a run in Hugging Face's format, or publishes it."""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.own_version import own_version
from flotilla_common.text.redaction import redact
from flotilla_launcher import learner_programs
from flotilla_launcher.cli.adapters.hub_upload import upload_model
from flotilla_launcher.cli.command_runner import OK, reports_errors
from flotilla_launcher.cli.exported_models import keep_export
from flotilla_launcher.cli.report import ask_ledger, installed_versions
from flotilla_launcher.cli.run_source import find_run_dir
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_reading.report.model_card import CardFacts, write_card
from flotilla_reading.report.reproduction import spec_file, spec_to_run
from flotilla_reading.report.run_facts import ReportedRun, read_run

_CARD = "README.md"
_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# The hub's identifiers: of a licence in a file, and of none that is known.
_IN_FILE, _UNKNOWN = "other", "unknown"


@dataclass(frozen=True, slots=True)
class Publication:
    """Where a model is published, and what its card cannot know: its licence and the name of its
    base model, if those are not in the run's files. A dry run only tells."""

    repo: str
    revision: str
    licence: str
    base_model: str
    private: bool
    dry_run: bool


@reports_errors()
def export_model(run_id: str, step: int | None, out: Path, runs: Path, *, adapters: bool) -> int:
    """Write the model of one of a run's checkpoints; return the exit code."""
    run_dir = find_run_dir(run_id, runs)
    # Checkpoints belong to the learner, so its own program reads them.
    command = [
        *learner_programs.learner_command(learner_programs.EXPORT, str(run_dir), "--out", str(out))
    ]
    command += [] if step is None else ["--step", str(step)]
    command += ["--adapters"] if adapters else []
    return subprocess.run(command, check=False, env=child_environment(ours=True)).returncode


@reports_errors()
def publish_model(
    run_id: str, step: int | None, wish: Publication, runs: Path, *, adapters: bool
) -> int:
    """Upload the model of one of a run's checkpoints with a card; return the exit code."""
    if _REPO.fullmatch(wish.repo) is None:
        raise CommandError(f"--push {wish.repo}: write OWNER/NAME, a repository of the hub")
    run_dir = find_run_dir(run_id, runs)
    folder, found = keep_export(run_dir, step, adapters=adapters)
    run = read_run(run_dir, ask_ledger(run_dir.name, runs))
    facts = CardFacts(
        step=found,
        base_model=wish.base_model or _find_base(run),
        licence=wish.licence or (_IN_FILE if any(folder.glob("LICENSE*")) else _UNKNOWN),
        libraries=installed_versions(),
        written_by=str(own_version()),
        adapters=adapters,
    )
    card = redact(write_card(run, facts))
    files = _list_files(folder, run, card)
    console = Terminal(soft_wrap=True)
    if wish.dry_run:
        _show_files(files, wish, console)
        console.print(f"\n{card}")
        return OK
    message = f"Publish step {found} of {run.run_id}"
    url = upload_model(
        *(files, wish.repo, wish.revision, message),
        lambda text: console.print(text, style="dim"),
        private=wish.private,
    )
    console.print(f"step {found} of {run.run_id} is at {url}")
    return OK


def _show_files(files: Mapping[str, Path | bytes], wish: Publication, console: Terminal) -> None:
    console.print(f"{wish.repo}, revision {wish.revision}, would get:")
    for name, content in files.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        console.print(f"{size:>15,} bytes  {name}")


def _find_base(run: ReportedRun) -> str:
    """Return the base model's name on the hub; "" if it was a folder."""
    model = str(run.spec.get("policy", {}).get("model", ""))
    return model if _REPO.fullmatch(model) and not Path(model).exists() else ""


def _list_files(folder: Path, run: ReportedRun, card: str) -> dict[str, Path | bytes]:
    """Return what is uploaded: the files of an exported model, the card, and the run's spec."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    files: dict[str, Path | bytes] = {str(path.relative_to(folder)): path for path in found}
    spec = json.dumps(spec_to_run(run.spec), indent=2, ensure_ascii=False) + "\n"
    return {**files, _CARD: card.encode(), spec_file(run): redact(spec).encode()}
