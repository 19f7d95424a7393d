"""What a file of `flotilla analyze --rules` imports: classes of failures of one's own.

These names stay when others of this package move; docs/evaluation.md has an example."""

from flotilla_reading.analysis.attempt_facts import AttemptFacts, ErrorKind, MadeCall
from flotilla_reading.analysis.failure_classes import FailureRule

__all__ = ["AttemptFacts", "ErrorKind", "FailureRule", "MadeCall"]
