"""The learner's durable state in one SQLite file. Start reading at `store.py`: its lock keeps a
second learner of this machine out, and its run epoch fences every write of an older one."""
