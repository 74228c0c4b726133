"""A job given to Slurm: the options of sbatch, the batch script, the snapshot of the code."""
