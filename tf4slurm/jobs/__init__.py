"""What is kept of a job: run directory, events, status, logs, registry."""
