"""Submit jobs with sbatch: options, batch script, snapshot of the code."""
