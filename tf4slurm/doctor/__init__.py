"""Checks of host, cluster and software that find what would prevent a job from running, each with advice."""
