"""All that knows Slurm."""
