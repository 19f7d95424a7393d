"""A hotel booking site with the tables and columns that Fleet's booking verifiers name."""
