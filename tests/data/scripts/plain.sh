#!/bin/bash
# Made by tf4slurm 0.1.0 with:
#   tf4slurm submit -N 4 --workers 2 -t 1:00:00 -- python train.py

#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --time=1:00:00
#SBATCH --open-mode=append
#SBATCH --ntasks=4

# After a requeue: a file of its own for the output of each run.
if [ -n "${SLURM_RESTART_COUNT:-}" ]; then exec >"slurm-$SLURM_JOB_ID.$SLURM_RESTART_COUNT.out" 2>&1; fi

exec /opt/tf4slurm/bin/tf4slurm run --site none --workers 2 --name train -- python train.py
