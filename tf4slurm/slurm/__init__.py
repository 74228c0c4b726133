"""Read what Slurm tells a process about its job, and run Slurm's programs."""
