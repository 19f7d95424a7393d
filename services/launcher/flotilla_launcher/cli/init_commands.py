"""The command that makes a folder for somebody's own tools: `flotilla init`."""

from pathlib import Path
from typing import Annotated

import typer


def add_init_command(app: typer.Typer) -> None:
    app.command()(init)


def init(
    folder: Annotated[
        Path,
        typer.Argument(metavar="NAME", help="Folder to create; its name is the environment's."),
    ],
    mcp: Annotated[
        list[str] | None,
        typer.Option(
            "--mcp",
            metavar="COMMAND|URL",
            help="A server: a command over stdio, in which {episode_dir} is the folder of an"
            " episode, or a URL. Repeatable.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="What an episode's folder holds at first; copied into NAME/state.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME=VALUE",
            help="A variable of the commands, such as MEMORY_FILE={episode_dir}/memory.json;"
            " $NAME is the value of one of yours. Repeatable.",
        ),
    ] = None,
    key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Variable with the bearer key of the URLs.")
    ] = "",
    read_only: Annotated[
        list[str] | None,
        typer.Option(
            "--read-only",
            metavar="TOOL",
            help="A tool that only reads, although its server does not say so. Repeatable.",
        ),
    ] = None,
    tasks: Annotated[
        int, typer.Option(min=1, max=2000, help="Tasks to train on; half as many are held out.")
    ] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Another seed makes other tasks.")] = 0,
    concurrency: Annotated[
        int, typer.Option(min=1, max=64, help="Episodes that are played concurrently.")
    ] = 4,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="URL|NAME",
            help="A model that names the calls of harder tasks, and writes the prompts in other"
            " words: an OpenAI-compatible endpoint, or a folder or name of the hub, which vLLM"
            " serves here.",
        ),
    ] = None,
    model_name: Annotated[
        str, typer.Option(help="Model of the endpoint (default: its first).")
    ] = "",
    model_key_env: Annotated[
        str, typer.Option(help="Variable with the endpoint's key, sent if it is set.")
    ] = "OPENAI_API_KEY",
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Then train a tiny policy on this machine, without a GPU. Without --mcp, in a"
            " folder that is there.",
        ),
    ] = False,
) -> None:
    """Make tasks from your own MCP servers: `flotilla init my-files --mcp "npx -y
    @modelcontextprotocol/server-filesystem {episode_dir}"`.

    Starts the servers, reads their tools, and plays short sequences of calls on fresh instances.
    Those that change what can be seen, twice alike, become tasks: a prompt, a solution, and the
    state that is expected. Each is then checked as by `flotilla data check`: its solution passes,
    and doing nothing does not. The tools that write are called, so name a server that may be
    changed: what it keeps outside of its episode's folder is changed for real. Of servers at a URL,
    which all episodes share, only tools that read are called.

    NAME then holds the run spec, tasks, verifier, solutions, demonstrations, a test and a README.
    If it fails nothing is written, or all but the tasks where none can be made. With `--train` a
    tiny policy is built for the tools, imitates the demonstrations and learns from its own
    attempts; a table says what it solves of the tasks that are held out before and after each. Exit
    code: 0 tasks were made, or the run has ended; 1 otherwise.
    """
    from flotilla_launcher.cli import init as command
    from flotilla_launcher.cli.init_train import train_folder

    if not mcp:
        if not train:
            raise typer.BadParameter(
                "name a server, or --train in a folder that is there", param_hint="--mcp"
            )
        raise typer.Exit(train_folder(folder, seed))

    chosen = model and command.ChosenModel(model, model_name, model_key_env, None, "")
    wish = command.InitWish(
        *(folder, tuple(mcp), state, tuple(env or ()), key_env, tuple(read_only or ())),
        *(tasks, seed, concurrency, chosen or None, train),
    )
    code = command.init_folder(wish)
    raise typer.Exit(train_folder(folder, seed) if train and code == 0 else code)
