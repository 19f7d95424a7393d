"""The learner as a further machine reaches it."""
