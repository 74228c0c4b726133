"""The launcher of a job, and the spawners that start its agents."""
