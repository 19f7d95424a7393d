"""Episodes as messages and as rows, made from the trajectories in a journal.

Start at `episode_text.py`. `episode_rows.py` makes the rows of dumps and exports from what
`stored_attempts.py` finds in the journal; `demonstrations.py` is the format of what is imitated."""
