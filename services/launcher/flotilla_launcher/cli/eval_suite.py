"""Suites of evaluations: a TOML file from which one command makes all numbers of a table."""

import tomllib
from pathlib import Path

from pydantic import Field

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel, parse_config
from flotilla_launcher.cli.command_runner import BAD_SPEC, reports_errors
from flotilla_launcher.cli.eval_model import ChosenModel, ModelEvaluation, evaluate_models


class SuiteEntry(ConfigModel):
    """One evaluation; its results are in the folder `name` of --out."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    spec: str
    model: str
    # Absent: the spec's held-out set.
    tasks: str | None = None
    model_name: str = ""
    key_env: str = "OPENAI_API_KEY"
    attempts: int = Field(default=4, ge=1, le=1000)
    # Absent: the endpoint's own.
    temperature: float | None = Field(default=None, ge=0, le=10)
    max_turns: int = Field(default=50, ge=1, le=100_000)
    vllm_args: str = ""


class EvaluationSuite(ConfigModel):
    """The file of a suite: tables [[eval]]."""

    eval: tuple[SuiteEntry, ...] = Field(min_length=1)


@reports_errors(bad_spec=BAD_SPEC)
def evaluate_suite(
    path: Path, out: Path, concurrency: int, runs: Path, against: str | None, *, as_json: bool
) -> int:
    """Make all evaluations of a suite's file, each in a folder of `out`."""
    return evaluate_models(read_suite(path, out, concurrency), runs, against, as_json=as_json)


def read_suite(path: Path, out: Path, concurrency: int) -> list[ModelEvaluation]:
    """Return the evaluations of a suite's file. Raises ConfigError."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    entries = parse_config(EvaluationSuite, given, where=str(path)).eval
    names = [each.name for each in entries]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: two evaluations have the name {twice[0]!r}")
    return [_to_evaluation(each, out / each.name, concurrency) for each in entries]


def _to_evaluation(entry: SuiteEntry, folder: Path, concurrency: int) -> ModelEvaluation:
    model = ChosenModel(
        entry.model, entry.model_name, entry.key_env, entry.temperature, entry.vllm_args
    )
    tasks = None if entry.tasks is None else Path(entry.tasks)
    return ModelEvaluation(
        *(Path(entry.spec), (), tasks, model),
        *(entry.attempts, entry.max_turns, concurrency, folder),
    )
