"""Plan, spawners, launcher."""
