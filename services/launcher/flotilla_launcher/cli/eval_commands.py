"""`flotilla eval`: a run's policy, any other model, or a suite of them, and comparisons."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flotilla_launcher.cli.options import (
    OVERRIDES,
    RUNS,
    Priority,
    Runs,
    Wait,
    refuse_without_effect,
)

_SUITE_OUT = Path("evaluations")


def _play_option(help: str, **settings: Any) -> Any:
    return typer.Option(rich_help_panel="With a model", help=help, **settings)


def add_eval_commands(app: typer.Typer) -> None:
    app.command(name="eval", context_settings=OVERRIDES)(evaluate)


def evaluate(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|RUN|FOLDER",
            help="Run spec, id of a run, or `newest`; with --against also RUN@STEP or a folder.",
            show_default=False,
        ),
    ] = "",
    model: Annotated[
        str | None,
        _play_option(
            "Evaluate this model on the spec's environments: an OpenAI-compatible endpoint, such as"
            " http://127.0.0.1:8000/v1, or one that vLLM serves here: a run (RUN, RUN@STEP), a"
            " folder, or a name of the hub.",
            metavar="URL|RUN|FOLDER|NAME",
        ),
    ] = None,
    suite: Annotated[
        Path | None,
        _play_option(
            "TOML file of evaluations, [[eval]] with name, spec, model, and as needed tasks,"
            " attempts, temperature, max_turns, model_name, key_env, vllm_args.",
            metavar="FILE",
        ),
    ] = None,
    tasks: Annotated[
        Path | None,
        _play_option("Task file, or prepared folder (default: the spec's held-out set)."),
    ] = None,
    attempts: Annotated[int, _play_option("Attempts at each task, k of pass@k.", min=1)] = 4,
    temperature: Annotated[
        float | None, _play_option("Default: the endpoint's own.", min=0.0, max=10.0)
    ] = None,
    model_name: Annotated[str, _play_option("Model of the endpoint (default: its first).")] = "",
    key_env: Annotated[
        str, _play_option("Variable with the endpoint's key, sent if it is set.")
    ] = "OPENAI_API_KEY",
    max_turns: Annotated[int, _play_option("Turns of an attempt.", min=1)] = 50,
    concurrency: Annotated[int, _play_option("Concurrent attempts.", min=1)] = 8,
    vllm_args: Annotated[
        str, _play_option("Arguments of vLLM, such as '--tool-call-parser qwen3_coder'.")
    ] = "",
    out: Annotated[
        Path | None,
        _play_option(
            "Folder of the results, to create or to go on with (default: in evaluations/).",
            metavar="FOLDER",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="RUN|FOLDER",
            help="Compare with this finished evaluation on the same tasks: RUN (its newest),"
            " RUN@STEP, or a folder of results.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print scores and comparison as one JSON object.")
    ] = False,
    wait: Wait = False,
    priority: Priority = 0,
    runs: Runs = RUNS,
) -> None:
    """Evaluate the newest checkpoint of a run on its held-out tasks, without training; or, with
    `--model`, any model on any tasks, and compare evaluations.

    With a spec, evaluate its newest run, or the initial policy if there is no run.

    With `--model`, tasks are played through a gateway of the spec's `[env_gateway]`, and each
    attempt is written to `results.jsonl` as it ends: the same command goes on where it was
    interrupted, and plays again what has no grade. Intervals are of 95 %, clustered by task.
    `--suite` does so for all evaluations of a file.

    With `--against`, two evaluations are compared by their common tasks: without `--model` these
    are finished ones, `flotilla eval RUN@40 --against RUN@0`.

    Exit code: 0 all attempts graded; 1 failed, or some have no grade; 2 bad spec or data; 130
    interrupted.
    """
    if not target and suite is None:
        raise typer.BadParameter("it is missing", param_hint="'SPEC|RUN|FOLDER'")
    if suite is not None:
        from flotilla_launcher.cli import eval_suite

        _refuse_others(context, "--suite", "suite", "concurrency", "out", "against", "as_json")
        folder = out or _SUITE_OUT / suite.stem
        code = eval_suite.evaluate_suite(suite, folder, concurrency, runs, against, as_json=as_json)
    elif model is not None:
        from flotilla_launcher.cli import eval_model as playing

        others = context.params.keys() - {"wait", "priority"}
        refuse_without_effect(context, "--model", besides=others)
        chosen = playing.ChosenModel(model, model_name, key_env, temperature, vllm_args)
        wish = playing.ModelEvaluation(
            *(Path(target), context.args, tasks, chosen, attempts, max_turns, concurrency, out)
        )
        code = playing.evaluate_models([wish], runs, against, as_json=as_json)
    elif against is not None:
        from flotilla_launcher.cli import eval_model as playing

        _refuse_others(context, "--against without --model", "target", "against", "as_json")
        code = playing.compare_evaluations(target, runs, against, as_json=as_json)
    else:
        from flotilla_launcher.cli import train as command

        own = ("target", "wait", "priority", "runs")
        refuse_without_effect(context, "a run's own policy (no --model)", besides=own)
        extra = context.args
        code = command.evaluate_policy(target, runs, extra, wait=wait, priority=priority)
    raise typer.Exit(code)


def _refuse_others(context: typer.Context, chosen: str, *besides: str) -> None:
    """Raise BadParameter for other options than these, and for overrides of a spec."""
    refuse_without_effect(context, chosen, besides=("runs", *besides))
    if context.args:
        raise typer.BadParameter(f"{context.args[0]}: it has no effect with {chosen}")
