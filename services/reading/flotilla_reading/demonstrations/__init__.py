"""Demonstrations from recorded episodes: `python -m flotilla_reading.demonstrations` and
`flotilla sft`.

Start at `run_episodes.py`; `acceptance.py` decides which episodes are imitated, and is pure.
`conversation_files.py` and `run_conversations.py` read messages, which the rollout renders."""
