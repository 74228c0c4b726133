#!/bin/bash
# Made by tf4slurm 0.1.0 with:
#   tf4slurm submit --single --gpus-per-node 1 --module python/3.10 -- python train.py

#SBATCH --job-name=train
#SBATCH --gpus-per-node=1
#SBATCH --open-mode=append
#SBATCH --ntasks=1

# After a requeue: a file of its own for the output of each run.
if [ -n "${SLURM_RESTART_COUNT:-}" ]; then exec >"slurm-$SLURM_JOB_ID.$SLURM_RESTART_COUNT.out" 2>&1; fi

type module >/dev/null 2>&1 || . /etc/profile
module load python/3.10 || exit 3

exec python train.py
