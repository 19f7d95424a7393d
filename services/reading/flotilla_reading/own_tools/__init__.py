"""`flotilla init`: tasks made from the tools of somebody's own servers, each with the end state by
which it is graded. `task_making.py` plays sampled calls and keeps what can be graded;
`folder_files.py` writes what was made; `written/` holds the files that go into the folder as they
are. All but `exploration.py`, `task_making.py` and `answer_making.py` is pure."""
