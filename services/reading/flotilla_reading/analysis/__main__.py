"""Analyze an evaluation of a run into its folder `analysis/`:

    python -m flotilla_reading.analysis runs/RUN_ID [--step N]

The launcher starts it after each evaluation, at low priority."""

import argparse
import os
import sys
from pathlib import Path

from flotilla_common.process.private_process import keep_private
from flotilla_common.text.printable_text import print_visible
from flotilla_reading.analysis.analysis_files import write_analysis
from flotilla_reading.analysis.evaluation_files import NothingToAnalyzeError
from flotilla_reading.analysis.run_analysis import analyze_run

# The run that is analyzed goes first.
_NICENESS = 19


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_reading.analysis",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", type=int, help="version that was evaluated; the newest if absent")
    given = parser.parse_args()
    os.nice(_NICENESS)
    try:
        for path in write_analysis(given.run_dir, analyze_run(given.run_dir, given.step)):
            print_visible(str(path))
    except (NothingToAnalyzeError, OSError) as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    keep_private()
    sys.exit(main())
