"""Grading: turns a verifier's runs on a final state into a known grade or an unknown one. Start
reading at `grader.py`."""
