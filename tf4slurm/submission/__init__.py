"""Jobs for sbatch: its options, the batch script, the snapshot of the code, the submission."""
