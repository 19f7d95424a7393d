"""Four services, the plumbing that they share (`common/`), and what two of them write on the wire
(`wire/`)."""
