"""One attempt at one task: prompt, turns, tool calls, transcript, reward. A reader starts at
`episode.py`."""
