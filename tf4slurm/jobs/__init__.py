"""The files of jobs: run directory, events, status, logs, registry."""
