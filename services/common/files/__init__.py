"""Files that survive a crash, tables as text, and folders that are removed."""
