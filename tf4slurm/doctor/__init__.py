"""Checks of host, cluster and software that find obstacles to running a job, with advice for each."""
