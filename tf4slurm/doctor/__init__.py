"""Check host, cluster and software for obstacles to running a job, and give advice for each obstacle."""
