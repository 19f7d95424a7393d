"""Durable state of the learner in one SQLite file. Start reading at `store.py`: its lock excludes
other learners on this machine, and its run epoch fences every write of an older one."""
