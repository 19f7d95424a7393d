"""Grading: turns a verifier's run into a known grade or an unknown one. Start reading at
`grader.py`."""
