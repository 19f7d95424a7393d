"""Files that `flotilla init` copies into the folder that it writes. They know only Python."""
