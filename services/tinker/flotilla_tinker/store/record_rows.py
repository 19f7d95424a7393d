"""Sessions, models, weights, samplers and checkpoints in the journal: each function is a part of a
transaction."""

import json
import sqlite3
from dataclasses import asdict, dataclass
from typing import Any

from flotilla_tinker.types import CheckpointRecord, ModelRecord, ModelSettings, SamplerRecord


@dataclass(frozen=True, slots=True)
class SessionRow:
    session_id: str
    tenant: str
    created_s: float


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model, and how to have the trainer hold it again."""

    record: ModelRecord
    next_seq: int
    # Number of its newest operation, and what to subtract from one for the trainer.
    operations: int
    numbering: int
    # Its newest saved state, if any, and the operation after which it was saved.
    recovery_folder: str | None
    recovery_operation: int
    recovery_updates: int


@dataclass(frozen=True, slots=True)
class WeightsRow:
    """Weights that samplers use; those of a session end with it."""

    weights_id: str
    tenant: str
    session_id: str | None
    label: str
    folder: str | None
    whole: bool
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SamplerRow:
    record: SamplerRecord
    weights_id: str


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    record: CheckpointRecord
    folder: str
    # Name of the weights in the samples.
    label: str


def add_session(db: sqlite3.Connection, session: SessionRow, facts_json: str) -> None:
    db.execute(
        "INSERT INTO sessions VALUES (?, ?, ?, ?, NULL)",
        (session.session_id, session.tenant, facts_json, session.created_s),
    )


def find_session(db: sqlite3.Connection, session_id: str) -> tuple[str, float | None] | None:
    """Return the session's tenant and end."""
    sql = "SELECT tenant, ended_s FROM sessions WHERE session_id = ?"
    found = db.execute(sql, (session_id,)).fetchone()
    return None if found is None else (found[0], found[1])


def open_sessions(db: sqlite3.Connection) -> list[SessionRow]:
    sql = "SELECT session_id, tenant, created_s FROM sessions WHERE ended_s IS NULL"
    return [SessionRow(*row) for row in db.execute(sql)]


def end_session(db: sqlite3.Connection, session_id: str, now: float) -> list[str]:
    """End a session, its models and samplers, and forget the weights that are only its own, and
    the operations that would have been repeated.

    Return the folders that nothing names any more."""
    folders = db.execute(
        "SELECT folder FROM weights WHERE session_id = ? UNION SELECT recovery_folder FROM models"
        " WHERE session_id = ? AND recovery_folder IS NOT NULL",
        (session_id, session_id),
    ).fetchall()
    for table in ("sessions", "models"):
        sql = f"UPDATE {table} SET ended_s = ? WHERE session_id = ? AND ended_s IS NULL"
        db.execute(sql, (now, session_id))
    models = "SELECT model_id FROM models WHERE session_id = ?"
    db.execute(f"DELETE FROM refused WHERE model_id IN ({models})", (session_id,))
    db.execute("DELETE FROM samplers WHERE session_id = ?", (session_id,))
    db.execute("DELETE FROM weights WHERE session_id = ?", (session_id,))
    db.execute(
        "DELETE FROM bodies WHERE number IN"
        " (SELECT number FROM orders WHERE session_id = ? AND operation IS NOT NULL)",
        (session_id,),
    )
    return [folder for (folder,) in folders]


def add_model(db: sqlite3.Connection, model: ModelRecord) -> None:
    db.execute(
        "INSERT OR IGNORE INTO models (model_id, session_id, tenant, settings_json, created_s)"
        " VALUES (?, ?, ?, ?, ?)",
        (
            *(model.model_id, model.session_id, model.tenant),
            *(json.dumps(asdict(model.settings)), model.created_s),
        ),
    )


def save_model(db: sqlite3.Connection, row: ModelRow) -> None:
    """Write all of a model that changes."""
    db.execute(
        "UPDATE models SET ended_s = ?, next_seq = ?, operations = ?, updates = ?, numbering = ?,"
        " recovery_folder = ?, recovery_operation = ?, recovery_updates = ? WHERE model_id = ?",
        (
            *(row.record.ended_s, row.next_seq, row.operations, row.record.updates),
            *(row.numbering, row.recovery_folder, row.recovery_operation, row.recovery_updates),
            row.record.model_id,
        ),
    )


def find_model(db: sqlite3.Connection, model_id: str) -> ModelRow | None:
    row = db.execute("SELECT * FROM models WHERE model_id = ?", (model_id,)).fetchone()
    return None if row is None else _model_of(row)


def live_models(db: sqlite3.Connection) -> list[ModelRow]:
    return [_model_of(row) for row in db.execute("SELECT * FROM models WHERE ended_s IS NULL")]


def models_of(db: sqlite3.Connection, tenant: str) -> list[ModelRow]:
    """Return a tenant's models, ended ones too, newest first."""
    sql = "SELECT * FROM models WHERE tenant = ? ORDER BY created_s DESC, model_id DESC"
    return [_model_of(row) for row in db.execute(sql, (tenant,))]


def put_weights(db: sqlite3.Connection, row: WeightsRow) -> None:
    values: tuple[Any, ...] = (row.weights_id, row.tenant, row.session_id, row.label, row.folder)
    sql = "INSERT OR REPLACE INTO weights VALUES (?, ?, ?, ?, ?, ?, ?)"
    db.execute(sql, (*values, int(row.whole), row.size_bytes))


def delete_weights(db: sqlite3.Connection, weights_id: str) -> None:
    db.execute("DELETE FROM weights WHERE weights_id = ?", (weights_id,))


def all_weights(db: sqlite3.Connection) -> list[WeightsRow]:
    return [
        WeightsRow(*tuple(row)[:5], whole=bool(row["whole"]), size_bytes=row["size_bytes"])
        for row in db.execute("SELECT * FROM weights")
    ]


def add_sampler(db: sqlite3.Connection, row: SamplerRow) -> None:
    record = row.record
    db.execute(
        "INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?, ?, ?)",
        (
            *(record.sampler_id, record.session_id, record.tenant, record.base_model),
            *(record.model_path, row.weights_id),
        ),
    )


def all_samplers(db: sqlite3.Connection) -> list[SamplerRow]:
    rows = db.execute("SELECT * FROM samplers")
    return [SamplerRow(SamplerRecord(*tuple(row)[:5]), row["weights_id"]) for row in rows]


def put_checkpoint(db: sqlite3.Connection, row: CheckpointRow) -> None:
    record = row.record
    db.execute(
        "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(record.path, record.model_id, record.tenant, record.kind, row.folder, row.label),
            json.dumps(asdict(record.settings)),
            *(record.created_s, record.size_bytes, record.expires_s),
        ),
    )


def set_expiry(db: sqlite3.Connection, path: str, expires_s: float | None) -> None:
    db.execute("UPDATE checkpoints SET expires_s = ? WHERE path = ?", (expires_s, path))


def delete_checkpoint(db: sqlite3.Connection, path: str) -> None:
    db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))


def all_checkpoints(db: sqlite3.Connection) -> list[CheckpointRow]:
    return [_checkpoint_of(row) for row in db.execute("SELECT * FROM checkpoints ORDER BY rowid")]


def _settings_of(row: sqlite3.Row) -> ModelSettings:
    return ModelSettings(**json.loads(row["settings_json"]))


def _model_of(row: sqlite3.Row) -> ModelRow:
    record = ModelRecord(
        model_id=row["model_id"],
        session_id=row["session_id"],
        tenant=row["tenant"],
        settings=_settings_of(row),
        created_s=row["created_s"],
        last_seq=row["next_seq"] - 1,
        updates=row["updates"],
        ended_s=row["ended_s"],
    )
    names = ("next_seq", "operations", "numbering")
    recovery = ("recovery_folder", "recovery_operation", "recovery_updates")
    return ModelRow(record, **{name: row[name] for name in (*names, *recovery)})


def _checkpoint_of(row: sqlite3.Row) -> CheckpointRow:
    record = CheckpointRecord(
        path=row["path"],
        model_id=row["model_id"],
        tenant=row["tenant"],
        kind=row["kind"],
        created_s=row["created_s"],
        size_bytes=row["size_bytes"],
        settings=_settings_of(row),
        expires_s=row["expires_s"],
    )
    return CheckpointRow(record, row["folder"], row["label"])
