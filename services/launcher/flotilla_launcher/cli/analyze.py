"""`flotilla analyze`: why attempts of a run fail, and how it learns."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.text.printable_text import print_json
from flotilla_launcher.cli.adapters.chat_endpoint import open_endpoint
from flotilla_launcher.cli.command_runner import BAD_SPEC, OK, reports_errors
from flotilla_launcher.cli.run_source import find_run_dir
from flotilla_launcher.cli.terminal import CommandError, Terminal, make_table, print_table
from flotilla_reading.analysis.analysis_files import write_analysis
from flotilla_reading.analysis.class_judge import judge_rows
from flotilla_reading.analysis.evaluation_files import (
    NOT_JUDGED,
    NothingToAnalyzeError,
    choose_evaluation,
    find_unknown,
)
from flotilla_reading.analysis.failure_classes import RULES, FailureRule, load_rules
from flotilla_reading.analysis.run_analysis import analyze_run
from flotilla_reading.analysis.sections import Section, make_sections


@dataclass(frozen=True, slots=True)
class JudgeChoice:
    """The model of an endpoint that classes up to `calls` attempts that no rule knows; `key_env`
    names the variable with the endpoint's key."""

    url: str
    model: str
    key_env: str
    calls: int


@dataclass(frozen=True, slots=True)
class AnalysisChoice:
    """The evaluated version (the newest for None), a file of rules, and a judge, if any."""

    step: int | None = None
    rules: Path | None = None
    judge: JudgeChoice | None = None


@reports_errors(bad_spec=BAD_SPEC)
def analyze(run_id: str, runs: Path, chosen: AnalysisChoice, *, as_json: bool) -> int:
    """Analyze an evaluation of a run, write its files, and print it."""
    run_dir, judge = find_run_dir(run_id, runs), chosen.judge
    try:
        rules = RULES if chosen.rules is None else load_rules(chosen.rules)
        _, folder = choose_evaluation(run_dir, chosen.step)
        judged = asyncio.run(_judge(judge, run_dir, folder, rules)) if judge else NOT_JUDGED
        analysis = analyze_run(run_dir, chosen.step, rules, judged)
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


async def _judge(
    judge: JudgeChoice, run_dir: Path, folder: Path, rules: Sequence[FailureRule]
) -> Mapping[AttemptKey, str]:
    key = os.environ.get(judge.key_env, "").strip()
    rows = islice(find_unknown(folder, rules), judge.calls)
    async with open_endpoint(judge.url, model=judge.model, key=key, temperature=0.0) as endpoint:

        async def ask(question: str) -> str:
            asked = [{"role": "user", "content": question}]
            return (await endpoint.answer_messages(asked, ())).text

        return await judge_rows(rows, run_dir, endpoint.model, ask, rules)


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
