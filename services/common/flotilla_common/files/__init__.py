"""Files that survive a crash, writes of SQLite that share commits, tables as text, and folders that
are removed."""
