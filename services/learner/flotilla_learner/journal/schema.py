"""Tables of the journal, and the types that are read from them."""

from dataclasses import dataclass, field

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.trajectory import Trajectory
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.types import StepSettings

# Key in `meta`: the run that the journal belongs to, as JSON.
RUN_ID = "run_id"
# Key in `meta`: number of acknowledged tries that were lost with the disks of earlier starts and
# are in no table any more.
LOST_WITH_DISK = "lost_with_disk"

# Pictures that a group's trajectories show, each once; `grid` is JSON, `sha256` hexadecimal. Since
# format 7.
PICTURES = """
CREATE TABLE IF NOT EXISTS pictures (
  group_id TEXT NOT NULL, sha256 TEXT NOT NULL, grid TEXT NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (group_id, sha256));
"""

# A teacher's logprobs of the attempts of a plan. Since format 8.
TEACHER_SCORES = """
CREATE TABLE IF NOT EXISTS teacher_scores (
  group_id TEXT NOT NULL, attempt_index INTEGER NOT NULL, try INTEGER NOT NULL,
  digest BLOB NOT NULL, payload BLOB NOT NULL,
  PRIMARY KEY (group_id, attempt_index, try));
"""

# What a judge said about a group; `scores` is JSON, by attempt, and null if it came to none. Since
# format 9.
VERDICTS = """
CREATE TABLE IF NOT EXISTS verdicts (
  group_id TEXT PRIMARY KEY, scores TEXT, failure TEXT NOT NULL, model TEXT NOT NULL,
  request_digest BLOB NOT NULL, answer TEXT NOT NULL, calls INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL,
  made REAL NOT NULL);
"""

TABLES = f"""
BEGIN;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
-- Totals of all other rows, and their chain of commits; one row (see table_checksums.py).
CREATE TABLE IF NOT EXISTS seal (id INTEGER PRIMARY KEY CHECK (id = 1), body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (
  run_epoch INTEGER PRIMARY KEY, forked_version INTEGER NOT NULL, started REAL NOT NULL);
-- state: open, planned, filtered, dropped, evaluated
CREATE TABLE IF NOT EXISTS groups (
  group_id TEXT PRIMARY KEY, sequence_number INTEGER NOT NULL, purpose TEXT NOT NULL,
  eval_id TEXT NOT NULL, spec TEXT NOT NULL, leased INTEGER NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL, step INTEGER);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state, purpose);
CREATE TABLE IF NOT EXISTS leases (
  lease_id TEXT PRIMARY KEY, group_id TEXT NOT NULL, worker_id TEXT NOT NULL,
  incarnation TEXT NOT NULL, request_id TEXT NOT NULL, run_epoch INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS leases_by_group ON leases (group_id);
CREATE INDEX IF NOT EXISTS leases_by_worker ON leases (worker_id);
-- The payload comes last: SQLite reaches columns behind it only through all of its pages.
CREATE TABLE IF NOT EXISTS trajectories (
  group_id TEXT NOT NULL, attempt_index INTEGER NOT NULL, try INTEGER NOT NULL,
  reward REAL, failure TEXT, record_digest BLOB NOT NULL, content_digest BLOB NOT NULL,
  summary TEXT NOT NULL, array_digest BLOB NOT NULL, row_digest BLOB NOT NULL,
  received REAL NOT NULL, dropped TEXT NOT NULL, payload BLOB,
  PRIMARY KEY (group_id, attempt_index, try));
-- Tools that chat templates were given, by the digest in `facts` of the trajectories' summaries.
CREATE TABLE IF NOT EXISTS tools (digest TEXT PRIMARY KEY, tools BLOB NOT NULL);
{PICTURES}
{TEACHER_SCORES}
{VERDICTS}
-- One step's attempts in order and settings, committed before the step runs.
CREATE TABLE IF NOT EXISTS plans (
  step INTEGER PRIMARY KEY, run_epoch INTEGER NOT NULL, attempts TEXT NOT NULL,
  settings TEXT NOT NULL, row_digest BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS publications (
  run_epoch INTEGER NOT NULL, version INTEGER NOT NULL, fingerprint BLOB NOT NULL,
  PRIMARY KEY (run_epoch, version));
CREATE TABLE IF NOT EXISTS checkpoints (
  step INTEGER PRIMARY KEY, directory TEXT NOT NULL, files TEXT NOT NULL, made REAL NOT NULL);
CREATE TABLE IF NOT EXISTS evals (
  eval_id TEXT PRIMARY KEY, moment TEXT NOT NULL, version INTEGER NOT NULL,
  results TEXT NOT NULL);
-- Position in the order of tasks after a change: it holds for group `number` and all after.
CREATE TABLE IF NOT EXISTS curriculum (
  id INTEGER PRIMARY KEY, number INTEGER NOT NULL, step INTEGER, cursors TEXT NOT NULL,
  made REAL NOT NULL);
-- State of each task after the newest change; standing: active, solved, impossible, quarantined.
CREATE TABLE IF NOT EXISTS curriculum_tasks (
  task TEXT PRIMARY KEY, env TEXT NOT NULL, standing TEXT NOT NULL, groups INTEGER NOT NULL,
  passes REAL NOT NULL, attempts REAL NOT NULL, queued INTEGER NOT NULL,
  turn INTEGER NOT NULL, member INTEGER NOT NULL);
-- Log of changes; `change` is the id in `curriculum`.
CREATE TABLE IF NOT EXISTS curriculum_events (
  id INTEGER PRIMARY KEY, change INTEGER NOT NULL, task TEXT NOT NULL, env TEXT NOT NULL,
  kind TEXT NOT NULL, reason TEXT NOT NULL);
COMMIT;
"""

# Removes arrays that every kept checkpoint contains, except those of the first group of each step
# and of held groups (see `holds`), given as a JSON array.
PRUNE = """
UPDATE trajectories SET payload = NULL WHERE payload IS NOT NULL AND group_id IN (
  SELECT group_id FROM groups
  WHERE (state IN ('planned', 'filtered') AND step <= ? OR state IN ('dropped', 'evaluated'))
    AND group_id NOT IN (
      SELECT min(group_id) FROM groups WHERE state = 'planned' AND step <= ? GROUP BY step)
    AND group_id NOT IN (SELECT value FROM json_each(?)))
"""


# Removes the pictures of groups of which no arrays are left.
PRUNE_PICTURES = """
DELETE FROM pictures WHERE NOT EXISTS (
  SELECT 1 FROM trajectories t WHERE t.group_id = pictures.group_id AND t.payload IS NOT NULL)
"""

# Removes a teacher's scores of those groups, likewise.
PRUNE_SCORES = """
DELETE FROM teacher_scores WHERE NOT EXISTS (
  SELECT 1 FROM trajectories t WHERE t.group_id = teacher_scores.group_id AND t.payload IS NOT NULL)
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """Attempts that step `step` trains on, in order, and its settings.

    With the parameters before it, it determines the step's result: a step draws no random
    numbers."""

    step: int
    attempts: tuple[AttemptKey, ...]
    settings: StepSettings = field(default_factory=StepSettings)


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A TRAIN group that a restart resumes."""

    spec: GroupSpec
    leased: bool
    # (lease_id, worker_id, incarnation, request_id) of its newest lease.
    lease: tuple[str, str, str, str] | None
    # Its tries, each with the reason why it is not used, "" for those that are.
    trajectories: tuple[tuple[Trajectory, str], ...]
    # Tries that differ from what was written; not among `trajectories`.
    damaged: tuple[AttemptKey, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One committed checkpoint; `files` is name to SHA-256 hex."""

    step: int
    directory: str
    files: dict[str, str]
