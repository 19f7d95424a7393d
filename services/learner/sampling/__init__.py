"""Which task comes when: selection, curriculum, quarantine."""
