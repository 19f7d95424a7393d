"""Commands that try and publish a run's model: `flotilla export`, `chat` and `serve`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flotilla_launcher.cli.options import RUNS, Runs, refuse_without_effect


def add_result_commands(app: typer.Typer) -> None:
    for command in (export, chat, serve):
        app.command()(command)


def chat(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]|SPEC", help="Id of a run, or `newest`; with --model, or a run spec."
        ),
    ],
    key: Annotated[
        str, typer.Option("--task", metavar="KEY", help="Begin with this task, and grade it.")
    ] = "",
    tasks: Annotated[
        Path | None,
        typer.Option("--tasks", metavar="FILE", help="Task file. Default: those of the spec."),
    ] = None,
    env: Annotated[
        str, typer.Option("--env", help="Environment. Default: that of the first task.")
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="URL|NAME",
            help="Talk with another model: an OpenAI-compatible endpoint, or a folder or name of"
            " the hub, which vLLM serves here.",
        ),
    ] = "",
    model_name: Annotated[
        str, typer.Option("--model-name", help="Model of the endpoint (default: its first).")
    ] = "",
    model_key_env: Annotated[
        str, typer.Option("--model-key-env", help="Variable with the endpoint's key, if it is set.")
    ] = "OPENAI_API_KEY",
    max_turns: Annotated[
        int, typer.Option("--max-turns", min=1, help="Turns of the model for one line of yours.")
    ] = 50,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0.0, max=10.0, help="Default: the endpoint's own."),
    ] = None,
    vllm_args: Annotated[
        str, typer.Option("--vllm-args", help="Further arguments of vLLM, which override ours.")
    ] = "",
    runs: Runs = RUNS,
) -> None:
    """Talk with a run's model, which has the tools of the run's environment.

    The model is served as by `flotilla serve`, and the environment opened as by `flotilla env try`,
    in the state that its first task begins with. Lines come from the terminal or a pipe; the
    model's turns, its calls and their answers are printed. `/tools`, `/reset`, `/grade` and `/quit`
    are commands; Ctrl-C ends a turn, and pressed again the conversation. With `--task` the
    conversation begins with a task's prompt, and is graded at its end. Exit code: 0; 1 if it cannot
    begin, or has no grade; 130 after Ctrl-C.
    """
    from flotilla_launcher.cli import chat as command

    chosen = command.ChosenModel(model, model_name, model_key_env, temperature, vllm_args)
    wish = command.ChatWish(run, chosen, tasks, key, env, max_turns)
    raise typer.Exit(command.chat(wish, runs))


def serve(
    run: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="Id of a run, or `newest`.")],
    host: Annotated[
        str, typer.Option("--host", help="Beyond loopback VLLM_API_KEY must be set.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen at; 0: any free port.")
    ] = 8000,
    vllm_args: Annotated[
        str, typer.Option("--vllm-args", help="Further arguments of vLLM, which override ours.")
    ] = "",
    runs: Runs = RUNS,
) -> None:
    """Serve a run's model behind vLLM's own OpenAI-compatible server.

    The checkpoint is exported to `runs/RUN_ID/exports` unless it is there, and served with the
    run's window, dtype and chat template, and the parsers of its dialect. The model's name is
    RUN@STEP. Ctrl-C ends the server. Exit code: 0 ended by Ctrl-C, 1 failed.
    """
    from flotilla_launcher.cli import serve as command

    raise typer.Exit(command.serve_run(run, runs, host, port, vllm_args))


def _publish_option(help: str, **settings: Any) -> Any:
    return typer.Option(rich_help_panel="To the Hugging Face hub", help=help, **settings)


def export(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to create; must not exist.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="Step of the checkpoint. Default: the newest."),
    ] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write only the adapters of learner.lora, for PEFT.")
    ] = False,
    push: Annotated[
        str, _publish_option("Publish it there, in place of --out.", metavar="OWNER/NAME")
    ] = "",
    private: Annotated[
        bool, _publish_option("Only for a private repository; a new one is made so.")
    ] = False,
    revision: Annotated[str, _publish_option("Branch, which is made if it is not there.")] = "main",
    licence: Annotated[
        str,
        typer.Option(
            "--license",
            rich_help_panel="To the Hugging Face hub",
            help="Licence of the model, such as apache-2.0. Default: the model's own LICENSE, or"
            " unknown.",
        ),
    ] = "",
    base_model: Annotated[
        str, _publish_option("Name of the base model, if policy.model is a folder.")
    ] = "",
    dry_run: Annotated[
        bool, _publish_option("Only print the files and the card that would be published.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Write the model of a run in Hugging Face's format, for transformers and vLLM; or publish it.

    Includes the tokenizer, chat template and generation config; `sha256sum -c SHA256SUMS` verifies
    it. A completed run already has its final model in `runs/RUN_ID/model`. Adapters of
    `learner.lora` are merged, unless `--adapters` selects only them.

    `--push` uploads it to a repository of the hub (HF_TOKEN), with the run's spec, without secrets,
    and a card: results with intervals, data, versions, and how to reproduce them. A repeated call
    uploads only what is missing. Look at the card first: `--dry-run`.

    Reads the run's files, so run it on the launcher's machine; FLOTILLA_LAUNCHER has no effect.
    """
    from flotilla_launcher.cli import export as command

    if not push:
        if out is None:
            raise typer.BadParameter("--out DIR or --push OWNER/NAME is needed")
        here = ("run", "out", "step", "adapters", "runs")
        refuse_without_effect(context, "--out; it needs --push", besides=here)
        raise typer.Exit(command.export_model(run, step, out, runs, adapters=adapters))
    if out is not None:
        raise typer.BadParameter("--push keeps the model in the run's folder; leave out --out")
    wish = command.Publication(
        push, revision, licence, base_model, private=private, dry_run=dry_run
    )
    raise typer.Exit(command.publish_model(run, step, wish, runs, adapters=adapters))
