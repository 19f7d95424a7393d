"""Write the model of a run's checkpoint in Hugging Face's format, for transformers and vLLM."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flotilla_common.files.json_files import read_json_object
from flotilla_common.process.private_process import refuse_core_dumps
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError, open_read_only
from flotilla_common.spec.spec import parse_shared
from flotilla_common.text.printable_text import print_visible
from flotilla_learner.checkpoints.adapters.model_assets import assets_of, folder_under
from flotilla_learner.checkpoints.export import ExportError, export_adapters, export_model
from flotilla_learner.run_files.checkpoint_manifest import (
    HOSTED_STATE,
    DamagedCheckpointError,
    ForeignCheckpointError,
    verify_checkpoint,
)

OK, UNABLE = 0, 2
_REFUSALS = (
    ConfigError,
    ExportError,
    JournalError,
    DamagedCheckpointError,
    ForeignCheckpointError,
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_learner.checkpoints.export_command",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--step", type=int, help="step of a kept checkpoint (default: the newest)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument(
        "--adapters", action="store_true", help="only the adapters (learner.lora), for PEFT"
    )
    given = parser.parse_args(argv)
    try:
        step = _export_step(given.run_dir, given.step, given.out, adapters=given.adapters)
    except _REFUSALS as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return UNABLE
    print_visible(f"Exported step {step} of {given.run_dir.name} to {given.out}")
    return OK


def _export_step(run_dir: Path, step: int | None, out: Path, *, adapters: bool) -> int:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} already exists: choose another folder, or remove it")
    policy = parse_shared(_read_spec(run_dir), where=str(run_dir / "spec.json")).policy
    steps = _kept_folders(run_dir / JOURNAL_FILE)
    if not steps:
        raise ExportError(f"{run_dir} has no checkpoint yet")
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        kept = ", ".join(str(step) for step in sorted(steps))
        raise ExportError(f"{run_dir} has no checkpoint of step {chosen}; it has those of {kept}")
    folder = run_dir / "checkpoints" / steps[chosen]
    verify_checkpoint(folder)
    if (folder / HOSTED_STATE).exists():
        address = read_json_object(folder / HOSTED_STATE).get("address")
        raise ExportError(
            f"the weights of {folder} are at the Tinker service that trained it: `tinker checkpoint"
            f" download {address}` fetches them"
        )
    if adapters:
        export_adapters(folder, assets_of(policy), out)
    else:
        export_model(folder, folder_under(folder, policy), policy, out)
    return chosen


def _read_spec(run_dir: Path) -> dict[str, object]:
    path = run_dir / "spec.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read, so the run's policy is unknown") from error


def _kept_folders(journal: Path) -> dict[int, str]:
    """Return the folder names of the kept checkpoints, by step."""
    if not journal.exists():
        raise ExportError(f"{journal} does not exist, so no checkpoint is known")
    with open_read_only(journal) as db:
        rows = db.execute("SELECT step, directory FROM checkpoints").fetchall()
    return {step: Path(directory).name for step, directory in rows}


if __name__ == "__main__":
    refuse_core_dumps()
    sys.exit(main())
