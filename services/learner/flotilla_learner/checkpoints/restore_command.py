"""Restore a run from its uploaded checkpoints to this machine, so that it can be resumed here.

Prints the result as one JSON object. If the run cannot be restored, nothing is changed."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flotilla_common.process.private_process import keep_private
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import parse_shared
from flotilla_common.spec.spec_loading import load_spec
from flotilla_common.telemetry import log
from flotilla_common.text.printable_text import print_json, print_visible
from flotilla_learner.checkpoints.adapters.fsspec_store import open_store
from flotilla_learner.checkpoints.remote_repair import Restored
from flotilla_learner.checkpoints.remote_restore import NothingThereError, RestoreError, restore
from flotilla_learner.config.learner import CheckpointConfig
from flotilla_learner.ports import RemoteStoreError

OK, UNABLE, RETRYABLE, NOTHING = 0, 2, 3, 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_learner.checkpoints.restore_command",
        description=__doc__,
        epilog="Exit codes: 0 restored, 2 it cannot be, 3 the store was out of reach, 4 no run was"
        " ever uploaded there. Further arguments override keys of the spec.",
        allow_abbrev=False,
    )
    parser.add_argument("url", help="URL of the run, as in s3://bucket/prefix/RUN_ID")
    parser.add_argument("--config", type=Path, required=True, metavar="SPEC", help="run spec")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument(
        "--for-reading",
        action="store_true",
        help="leave out the model and the optimizer: the run can be shown, but not resumed",
    )
    given, overrides = parser.parse_known_args(argv)
    log.setup("restore", "")
    try:
        restored = _restore_run(given, overrides)
    except NothingThereError as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return NOTHING
    except (ConfigError, RestoreError) as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return UNABLE
    except RemoteStoreError as error:
        print_visible(f"error: cannot reach {given.url}: {error}", file=sys.stderr)
        return RETRYABLE
    print_json(asdict(restored))
    return OK


def _restore_run(given: argparse.Namespace, overrides: Sequence[str]) -> Restored:
    spec, where = load_spec(given.config, overrides), str(given.config)
    name = parse_shared(spec, where=where).name
    # The other keys are for a learner that resumes, which reads the run's own spec.
    table = dict(spec.get("learner", {})).get("checkpoint", {})
    config = parse_config(CheckpointConfig, table, where=where, section="learner.checkpoint")
    store = open_store(given.url, config.remote_options)
    return restore(store, given.runs, name=name, for_reading=given.for_reading)


if __name__ == "__main__":
    keep_private()
    sys.exit(main())
