"""One attempt at one task: prompt, turns, tool calls, transcript, reward. Start reading at
`episode.py`."""
