"""`flotilla report`: one page for a run, or for several next to each other.

`run_facts.py` reads what a run's folder has; the other modules only decide what is shown."""
