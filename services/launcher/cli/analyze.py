"""`flotilla analyze`: why attempts of a run fail, and how it learns."""

from pathlib import Path

from services.common.text.printable_text import print_json
from services.launcher.cli.command_runner import BAD_SPEC, OK, reports_errors
from services.launcher.cli.run_source import find_run_dir
from services.launcher.cli.terminal import CommandError, Terminal, make_table, print_table
from services.reading.analysis.analysis_files import write_analysis
from services.reading.analysis.evaluation_files import NothingToAnalyzeError
from services.reading.analysis.failure_classes import RULES, load_rules
from services.reading.analysis.run_analysis import analyze_run
from services.reading.analysis.sections import Section, make_sections


@reports_errors(bad_spec=BAD_SPEC)
def analyze(run_id: str, runs: Path, step: int | None, rules: Path | None, *, as_json: bool) -> int:
    """Analyze an evaluation of a run, write its files, and print it."""
    run_dir = find_run_dir(run_id, runs)
    try:
        analysis = analyze_run(run_dir, step, RULES if rules is None else load_rules(rules))
        written = write_analysis(run_dir, analysis)
    except (NothingToAnalyzeError, OSError) as error:
        raise CommandError(str(error)) from error
    if as_json:
        print_json(analysis)
        return OK
    console = Terminal()
    for section in make_sections(analysis):
        _print_section(section, console)
    for path in written:
        console.print(str(path), soft_wrap=True)
    return OK


def _print_section(section: Section, console: Terminal) -> None:
    console.print(section.title, style="bold")
    console.print(section.text, soft_wrap=True)
    table = make_table(section.headings)
    for row in section.rows:
        table.add_row(
            *(
                cell if isinstance(cell, str) else ", ".join(each.text for each in cell)
                for cell in row
            )
        )
    if section.rows:
        print_table(table, console)
    console.print()
