"""Commands for environments: `flotilla env status`, `flotilla env try`, `flotilla env serve`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flotilla_launcher.cli.options import OVERRIDES, RUNS, Runs, refuse_without_effect
from flotilla_launcher.cli.tool_commands import ENVIRONMENT_KEY, PASSED_ON, become_program


def _play_option(help: str, **settings: Any) -> Any:
    return typer.Option(rich_help_panel="With a model", help=help, **settings)


def add_env_commands(app: typer.Typer) -> None:
    env = typer.Typer(
        name="env",
        no_args_is_help=True,
        help="Shows the environments of a run, plays episodes by hand or by a model, and serves"
        " environments.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    env.command(name="status")(env_status)
    env.command(name="try", context_settings=OVERRIDES)(env_try)
    env.command(name="serve", context_settings=PASSED_ON)(env_serve)
    app.add_typer(env)


def env_status(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")] = "newest",
    address: Annotated[
        str | None,
        typer.Option(
            "--address", help="HOST:PORT of a gateway; its token is read from FLOTILLA_TOKEN."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Show episodes by state, limits, error rates, and grades with reasons for missing ones.

    Reads the run's files, so run it on the launcher's machine; FLOTILLA_LAUNCHER has no effect.
    """
    from flotilla_launcher.cli import env_status as command

    raise typer.Exit(command.env_status(run, runs, address, as_json=as_json))


def env_try(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec; only its [env_gateway] is used.")],
    tasks: Annotated[Path, typer.Argument(help="Task file.")],
    key: Annotated[str | None, typer.Option(help="Key of the task (default: the first).")] = None,
    answer: Annotated[str | None, typer.Option(help="The final answer to grade.")] = None,
    model: Annotated[
        str | None,
        _play_option(
            "Let a model play: an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1, or"
            " a folder or name of the hub, which vLLM serves here.",
            metavar="URL|NAME",
        ),
    ] = None,
    model_name: Annotated[str, _play_option("Model of the endpoint (default: its first).")] = "",
    model_key_env: Annotated[
        str, _play_option("Variable with the endpoint's key, sent if it is set.")
    ] = "OPENAI_API_KEY",
    attempts: Annotated[int, _play_option("Attempts at each task, k of pass@k.", min=1)] = 4,
    concurrency: Annotated[int, _play_option("Concurrent attempts.", min=1)] = 8,
    limit: Annotated[
        int | None, _play_option("Play only so many tasks, from all environments.", min=1)
    ] = None,
    max_turns: Annotated[int, _play_option("Turns of an attempt.", min=1)] = 50,
    temperature: Annotated[
        float | None, _play_option("Default: the endpoint's own.", min=0.0, max=10.0)
    ] = None,
    vllm_args: Annotated[
        str,
        _play_option(
            "Arguments of vLLM for NAME, such as"
            " '--tool-call-parser qwen3_coder --max-model-len 16384'."
        ),
    ] = "",
    out: Annotated[
        Path | None,
        _play_option("JSON lines file to create: each attempt's messages and reward."),
    ] = None,
) -> None:
    """Play episodes by hand or by a model: show a policy's observations and the reward.

    By hand, it plays one episode: tool calls come from standard input, one a line, a name and a
    JSON object; at the end of input the episode is graded. With `--model`, a model plays all tasks
    of the file, or the one of `--key`, several times, and pass@1 and pass@k are printed.

    Options such as `--env_gateway.backend=...` override the spec. Exit code: 0 all graded, 1
    otherwise.
    """
    from flotilla_launcher.cli import env_try as command

    play = None
    if model is None:
        by_hand = ("spec", "tasks", "key", "answer")
        refuse_without_effect(context, "an episode by hand", besides=by_hand)
    else:
        chosen = command.ChosenModel(model, model_name, model_key_env, temperature, vllm_args)
        play = command.ModelPlay(chosen, attempts, concurrency, limit, max_turns, out)
    raise typer.Exit(command.env_try(spec, tasks, key, answer, context.args, play))


def env_serve(context: typer.Context) -> None:
    """Serve the environments of this project over HTTP: `flotilla env serve --port 8765`.

    They speak MCP and Fleet's instance wire; with `--openenv`, OpenEnv. `flotilla env serve --help`
    lists the options.
    """
    become_program("env serve", context.args, ENVIRONMENT_KEY)
