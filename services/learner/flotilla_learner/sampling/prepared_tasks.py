"""Comparison of a run's task files with the manifest of prepared data that its spec names."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from flotilla_common.tasks.data_manifest import find_differing, read_data_manifest
from flotilla_common.tasks.task_files import TaskFileError, read_tasks


def check_prepared(data: str, trained: str, evaluated: Iterable[str]) -> None:
    """Raise TaskFileError unless the manifest `data` has each task of the file `trained`,
    unchanged, as one to train on, and does not have a task of the files `evaluated` as such. Of the
    latter it may lack any: they may be another set's."""
    manifest = read_data_manifest(Path(data))
    tasks = list(read_tasks(Path(trained)))
    _refuse(data, trained, find_differing(tasks, manifest.train))
    for path in dict.fromkeys(evaluated):
        tasks = list(read_tasks(Path(path), may_be_empty=True))
        keys = [read.task.key for read in tasks]
        held = [read for read in tasks if read.task.key in manifest.eval]
        _refuse(data, path, {key: "is one to train on" for key in keys if key in manifest.train})
        _refuse(data, path, find_differing(held, manifest.eval))


def _refuse(data: str, path: str, wrong: Mapping[str, str]) -> None:
    for key, why in wrong.items():
        raise TaskFileError(
            f"learner.data: {len(wrong)} tasks of {path} are not as {data} has them, {key!r} first,"
            f" which {why}: prepare the data again, or leave learner.data out"
        )
