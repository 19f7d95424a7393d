"""Another server that speaks Tinker's protocol, SkyRL's: `make test-skyrl`.

`conftest.py` starts it on a tiny model, with its JAX backend on the CPU. It speaks the protocol of
client 0.25; our adapters use their own, newer client. docs/tinker_training.md says what differs."""
