"""The fixed database: written-out hotels, generated ones around them, and the accounts."""
