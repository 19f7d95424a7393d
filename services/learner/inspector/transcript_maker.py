"""Makes transcripts one at a time, each in a low-priority child process, and keeps the newest few
in a folder that ends with this process."""

import json
import signal
import subprocess
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import Any

from services.common.child_environment import child_environment
from services.common.python_command import python_command, tied_command
from services.learner.inspector.pages.links import file_name
from services.learner.inspector.queries.transcript_attempts import TranscriptSubject

_PROGRAM = "services.learner.inspector.transcript_command"
_MOST_KEPT = 16
_LONGEST_S = 600.0
_BRIEF_S = 30.0


@dataclass(slots=True, eq=False)
class Transcript:
    """A requested transcript: waiting, made, or failed.

    `listed` is its line in the viewer's listing once it is made; `problem` is the reason if it
    could not be."""

    run_dir: Path
    subject: TranscriptSubject
    fingerprint: str
    path: Path
    listed: dict[str, Any] | None = None
    problem: str = ""
    # Monotonic time.
    made_at: float = 0.0

    @property
    def is_waiting(self) -> bool:
        return self.listed is None and not self.problem

    def serves(self, fingerprint: str) -> bool:
        """Return True if it need not be made again. A very recent one need not, because the newest
        step of a running run changes all the time."""
        recent = bool(self.listed) and time.monotonic() - self.made_at < _BRIEF_S
        return self.is_waiting or recent or self.fingerprint == fingerprint


class TranscriptMaker:
    """Transcripts of all runs of an inspector. Usable from several threads."""

    def __init__(self, policy: Path | None = None) -> None:
        """`policy` is the model folder with the tokenizer, if not the run's."""
        self._options = () if policy is None else ("--policy", str(policy))
        self._folder = TemporaryDirectory(prefix="flotilla-transcripts-")
        self._lock = Lock()
        self._kept: OrderedDict[tuple[Path, str], Transcript] = OrderedDict()
        self._wanted: SimpleQueue[Transcript | None] = SimpleQueue()
        self._child: subprocess.Popen[str] | None = None
        self._closed = False
        # Starts all children: Linux ends a tied child with the thread that started it.
        self._thread = Thread(target=self._work, name="transcripts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the current child, and remove all transcripts."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        self._wanted.put(None)
        self._thread.join()
        self._folder.cleanup()

    def want(self, run_dir: Path, subject: TranscriptSubject, fingerprint: str) -> Transcript:
        """Return a transcript; have it made if there is none of this state of the run. A failed one
        is retried the next time."""
        key = (run_dir, log_name(subject))
        with self._lock:
            known = self._kept.get(key)
            if known and known.serves(fingerprint):
                self._kept.move_to_end(key)
                if known.problem:
                    del self._kept[key]
                return known
            folder = Path(self._folder.name) / file_name(run_dir.name)
            folder.mkdir(exist_ok=True)
            wanted = Transcript(run_dir, subject, fingerprint, folder / key[1])
            self._kept[key] = wanted
            self._drop_oldest()
        self._wanted.put(wanted)
        return wanted

    def made(self, run_dir: Path) -> dict[str, Transcript]:
        """Return the finished transcripts of a run, by the names of their logs."""
        with self._lock:
            kept = list(self._kept.items())
        return {name: each for (run, name), each in kept if run == run_dir and each.listed}

    def _drop_oldest(self) -> None:
        while len(self._kept) > _MOST_KEPT:
            _, oldest = self._kept.popitem(last=False)
            oldest.path.unlink(missing_ok=True)

    def _work(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            with self._lock:
                dropped = wanted not in self._kept.values()
            if not dropped:
                self._make(wanted)

    def _make(self, wanted: Transcript) -> None:
        partial = wanted.path.with_name(f"partial-{wanted.path.name}")
        subject = wanted.subject
        which = (
            ("--eval", subject.eval_id) if subject.step is None else ("--step", f"{subject.step}")
        )
        program = python_command(
            "-m", _PROGRAM, "--run", str(wanted.run_dir), *which, *self._options
        )
        try:
            output = self._run(tied_command(signal.SIGKILL, *program, "--to", str(partial)))
            listed = json.loads(output)
            partial.replace(wanted.path)
        except (OSError, ValueError) as error:
            partial.unlink(missing_ok=True)
            wanted.problem = f"{error}"
            return
        wanted.made_at = time.monotonic()
        wanted.listed = listed

    def _run(self, command: tuple[str, ...]) -> str:
        """Return a child's output. Raises OSError, with its last line of stderr, if it fails."""
        with self._lock:
            if self._closed:
                raise OSError("the inspector ends")
            child = self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=child_environment(ours=True),
            )
        try:
            output, stderr = child.communicate(timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise OSError(f"it took more than {_LONGEST_S:.0f} s") from None
        finally:
            with self._lock:
                self._child = None
        if child.returncode != 0:
            last = stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
            raise OSError(last[0].removeprefix("error: "))
        return output


def log_name(subject: TranscriptSubject) -> str:
    if subject.step is not None:
        return f"step_{subject.step:06d}.eval"
    return f"eval_{file_name(subject.eval_id)}.eval"
