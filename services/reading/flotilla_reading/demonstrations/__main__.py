"""Write a run's accepted episodes to a file of demonstrations:

    python -m flotilla_reading.demonstrations runs/RUN_ID --out demonstrations.npz --best-of 8

Works on running and finished runs, and changes nothing. Prints one JSON object: what the file says
of itself. `learner.sft.data` names the file to a run with `learner.objective = "sft"`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_common.process.private_process import keep_private
from flotilla_common.run_folder.journal_file import JournalError
from flotilla_common.text.printable_text import print_json, print_visible
from flotilla_reading.demonstrations.acceptance import AcceptanceRules
from flotilla_reading.demonstrations.run_episodes import NoDemonstrationsError, make_demonstrations


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write; replaced if it exists"
    )
    parser.add_argument(
        "--min-reward", type=float, default=PASS_REWARD, help="least reward of an episode"
    )
    parser.add_argument(
        "--best-of", type=int, help="only the best of each so many attempts at a task"
    )
    chosen = parser.parse_args(argv)
    if chosen.best_of is not None and chosen.best_of < 1:
        parser.error(f"--best-of: expected at least 1; got {chosen.best_of}")
    try:
        rules = AcceptanceRules(chosen.min_reward, chosen.best_of)
        head = make_demonstrations(chosen.run_dir.absolute(), chosen.out, rules)
    except (NoDemonstrationsError, JournalError, OSError) as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return 1
    print_json(asdict(head))
    return 0


if __name__ == "__main__":
    keep_private()
    sys.exit(main())
