"""`[data]` of a run spec: the data that `flotilla data prepare` makes for the run.

It is short for a `[[prepare]]` command, and for the keys that name what this makes. The name of the
folder depends on all keys of the table: other wishes never find data of earlier ones, and a run
that is resumed goes on with those it began with."""

import glob
import hashlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel, canonical_json, parse_config
from flotilla_common.spec.text_lists import TextList, split_list

FOLDER = "build/data"
# Variables that the sources of each scheme read.
_S3, _GOOGLE, _AZURE = ("AWS_*", "S3_*"), ("GOOGLE_*", "GCS_*"), ("AZURE_*",)
_VARIABLES = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GOOGLE),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), _AZURE),
    "fleet": ("FLEET_*",),
}


def _as_texts(value: Any) -> Any:
    """Return levels, one or a list of numbers or texts, as texts."""
    items = split_list(str(value) if isinstance(value, int) else value)
    return tuple(map(str, items)) if isinstance(items, tuple) else items


class DataTable(ConfigModel):
    """Options of `flotilla data prepare`, each by its own name; `version` is `--data-version`."""

    # A task file, a folder, or a URL.
    source: str = Field(min_length=1)
    version: str = ""
    modality: str = ""
    env: TextList = ()
    difficulty: Annotated[tuple[str, ...], BeforeValidator(_as_texts)] = ()
    max_tasks: int | None = None
    held_out: TextList = ()
    eval_ratio: float | None = None
    eval_min: int | None = None
    eval_max: int | None = None
    max_eval: int | None = None
    max_env_share: float | None = None
    quarantine: str = ""
    keep_split: str = ""
    default_env: str = ""
    allow: TextList = ()
    strict: bool = False


def expand_data_table(spec: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a spec in which the table `data`, if there is one, is replaced by what it is short
    for: a command that makes a folder, `learner.data` and `learner.tasks`, which name files there,
    and the tasks of evaluation sets that name none. Raises ConfigError."""
    if "data" not in spec:
        return spec
    table = parse_config(DataTable, spec["data"], where=where, section="data")
    learner: Any = spec.get("learner", {})
    commands: Any = spec.get("prepare", [])
    if not isinstance(commands, list):
        raise ConfigError(f"{where}: prepare: write [[prepare]], with two brackets")
    given = [key for key in ("tasks", "data") if isinstance(learner, Mapping) and key in learner]
    if given:
        raise ConfigError(
            f"{where}: [data] makes learner.{given[0]}: leave out the one or the other"
        )
    folder = _folder_of(spec, table)
    expanded = {key: value for key, value in spec.items() if key != "data"}
    expanded["prepare"] = [*commands, _make_command(table, folder)]
    expanded["learner"] = _name_files(learner, folder)
    return expanded


def _folder_of(spec: Mapping[str, Any], table: DataTable) -> str:
    digest = hashlib.sha256(canonical_json(table.model_dump(mode="json")).encode()).hexdigest()
    return f"{FOLDER}/{spec.get('name', 'run')}-{digest[:8]}"


def _make_command(table: DataTable, folder: str) -> dict[str, Any]:
    command = ["flotilla", "data", "prepare", "--out", folder]
    for name, value in table.model_dump(mode="json", exclude={"source"}).items():
        option = "--data-version" if name == "version" else f"--{name.replace('_', '-')}"
        if value is True:
            command.append(option)
        elif value is not None and value is not False and value not in ("", []):
            text = ",".join(value) if isinstance(value, list) else str(value)
            command.append(f"{option}={text}")
    # The name of a file may begin like an option.
    command += ["--", table.source]
    scheme, colon, _ = table.source.partition(":")
    read = (table.source, table.quarantine, table.keep_split)
    files = [name for name in read if name and _is_here(name)]
    return {
        "creates": folder,
        "command": command,
        "message": f"Preparing tasks of {table.source}",
        "needs": [glob.escape(name) for name in files],
        "variables": list(_VARIABLES.get(scheme, ())) if colon else [],
    }


def _is_here(name: str) -> bool:
    """Return whether a name is that of a file below the working directory."""
    return ":" not in name and not PurePath(name).is_absolute()


def _name_files(learner: Any, folder: str) -> Any:
    """Return the learner's section with its tasks. What is no table is left to its own parser."""
    if not isinstance(learner, Mapping):
        return learner
    named = {**learner, "tasks": f"{folder}/train.jsonl", "data": f"{folder}/manifest.json"}
    evaluation = learner.get("eval")
    sets: Any = evaluation.get("sets") if isinstance(evaluation, Mapping) else None
    if isinstance(evaluation, Mapping) and isinstance(sets, list):
        there = {"tasks": f"{folder}/eval.jsonl"}
        filled = [{**there, **each} if isinstance(each, Mapping) else each for each in sets]
        named["eval"] = {**evaluation, "sets": filled}
    return named
