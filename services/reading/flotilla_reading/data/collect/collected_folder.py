"""The folder of a collection: tasks that were kept, their solutions and demonstrations, and the
evidence about all. All of it follows from the source and the ledger, so it is written anew at the
end of every run, and after an interrupted one."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_common.files.durable_files import replace_file, sync_path
from flotilla_common.process.own_version import own_version
from flotilla_common.run_folder.dump_files import json_line
from flotilla_reading.data.collect.budget import Prices
from flotilla_reading.data.collect.collection import Collection, SourceTask
from flotilla_reading.data.collect.demonstrations_file import demonstration_row
from flotilla_reading.data.collect.fates import Fate, Verdict
from flotilla_reading.data.collect.ledger import Ledger, Try
from flotilla_reading.data.collect.recorded_episodes import find_solution
from flotilla_reading.data.dataset_folder import MANIFEST, Origin
from flotilla_reading.play.solutions import Solution, format_solutions

FORMAT = 1
TASKS, SOLUTIONS = "tasks.jsonl", "solutions.jsonl"
DEMONSTRATIONS, EVIDENCE = "demonstrations.jsonl", "evidence.jsonl"


def write_collection(
    out: Path, collection: Collection, source: Origin, prices: Prices
) -> Sequence[tuple[SourceTask, Verdict]]:
    """Write all files of a collection, the manifest last; return the verdict about each task."""
    verdicts = [(task, collection.verdict_of(task)) for task in collection.tasks]
    kept = [task for task, verdict in verdicts if verdict.fate is Fate.KEPT]
    contents = {
        TASKS: "".join(f"{task.text}\n" for task in kept).encode(),
        SOLUTIONS: format_solutions(_shortest_solution(collection, task) for task in kept),
        DEMONSTRATIONS: _to_lines(
            row for task in kept for row in _find_demonstrations(collection, task)
        ),
        EVIDENCE: _to_lines(_describe(collection, *each) for each in verdicts),
    }
    files: dict[str, Any] = {}
    for name, content in contents.items():
        replace_file(out / name, content)
        rows, digest = content.count(b"\n"), hashlib.sha256(content).hexdigest()
        files[name] = {"rows": rows, "sha256": digest}
    spent, rules = collection.ledger.spent, collection.plan.rules
    manifest = {
        "format": FORMAT,
        "written_by": own_version().to_dict(),
        "source": source.to_dict(),
        "rules": {
            "tries": collection.plan.tries,
            "min_graded": rules.min_graded,
            "min_pass_rate": str(rules.least),
            "max_pass_rate": str(rules.most),
        },
        "spent": {
            "requests": spent.calls,
            "prompt_tokens": spent.prompt,
            "completion_tokens": spent.completion,
            "requests_of_unknown_tokens": spent.unknown,
            "cost": spent.cost(prices),
        },
        "counts": {"source": len(verdicts), **Counter(verdict.fate for _, verdict in verdicts)},
        "environments": count_fates(verdicts),
        "files": files,
    }
    replace_file(out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    sync_path(out)
    return verdicts


def count_fates(
    verdicts: Iterable[tuple[SourceTask, Verdict]],
) -> dict[str, dict[str, int]]:
    """Return what became of the tasks of each environment."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for task, verdict in verdicts:
        counts[task.env_key][verdict.fate] += 1
    return {env: dict(sorted(found.items())) for env, found in sorted(counts.items())}


def _find_replayed(collection: Collection, task: SourceTask) -> list[Try]:
    """Return the tries at a task that passed, and whose replay did."""
    tries = collection.tries_of(task)
    return [one for one in tries if one.outcome.passed and one.replay and one.replay.passed]


def _shortest_solution(collection: Collection, task: SourceTask) -> Solution:
    found = [
        find_solution(
            task.key,
            collection.ledger.conversation_of(one).messages,
            stopped=bool(one.stopped),
        )
        for one in _find_replayed(collection, task)
    ]
    return min(found, key=lambda solution: len(solution.calls))


def _find_demonstrations(collection: Collection, task: SourceTask) -> Iterator[Mapping[str, Any]]:
    """Yield the conversations of all tries that passed and whose replay did."""
    for one in _find_replayed(collection, task):
        said = collection.ledger.conversation_of(one)
        yield demonstration_row(task.key, said.messages, said.tools, one.reward)


def _describe(collection: Collection, task: SourceTask, verdict: Verdict) -> Mapping[str, Any]:
    return {
        "key": task.key,
        "environment": task.env_key,
        "digest": task.digest,
        "fate": verdict.fate,
        "reason": verdict.reason,
        "graded": verdict.graded,
        "passed": verdict.passed,
        "tries": [
            _describe_try(collection.ledger, one) for one in collection.ledger.tries_of(task.digest)
        ],
    }


def _describe_try(ledger: Ledger, one: Try) -> Mapping[str, Any]:
    spent = ledger.spending_of(one)
    return {
        "by": "teacher" if one.place else "recorded",
        "place": one.place or None,
        "ended": one.ended,
        "reward": one.reward,
        "no_grade": one.no_grade,
        "stopped": one.stopped,
        "requests": spent.calls,
        "prompt_tokens": spent.prompt,
        "completion_tokens": spent.completion,
        "replay": one.replay and {"reward": one.replay.reward, "no_grade": one.replay.no_grade},
    }


def _to_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(map(json_line, rows))
