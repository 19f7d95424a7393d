"""What is asked before a run costs anything: `flotilla doctor`, and the gate before each start."""
