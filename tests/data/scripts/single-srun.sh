#!/bin/bash
# Made by tf4slurm 0.1.0 with:
#   tf4slurm submit --single --srun cpu-bind=cores --srun container=/images/tf.oci -- python train.py

#SBATCH --job-name=train
#SBATCH --open-mode=append
#SBATCH --ntasks=1

# After a requeue: a file of its own for the output of each run.
if [ -n "${SLURM_RESTART_COUNT:-}" ]; then exec >"slurm-$SLURM_JOB_ID.$SLURM_RESTART_COUNT.out" 2>&1; fi

exec srun --cpu-bind=cores --container=/images/tf.oci python train.py
