"""The judge of a run's groups: a language model that scores attempts beside each other, where no
verifier can grade one by itself.

Start at `judge_desk.py`: complete groups come in, verdicts are journaled, then they count.
`question.py` says what the judge reads and which answers are taken, and `adapters/` asks it."""
