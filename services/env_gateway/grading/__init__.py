"""From a verifier's run to a grade or to none. A reader starts at `grader.py`."""
