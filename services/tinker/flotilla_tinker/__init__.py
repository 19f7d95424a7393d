"""The front door for clients of the Tinker SDK: its protocol over HTTP, answered by the learner's
TrainingService and the rollout's SamplingService. Start at `api/`."""
