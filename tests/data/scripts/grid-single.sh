#!/bin/bash
# Made by tf4slurm 0.1.0 with:
#   tf4slurm submit --single --grid units=32,64 --array 1 --srun label -- python train.py

#SBATCH --job-name=train
#SBATCH --array=1
#SBATCH --open-mode=append
#SBATCH --ntasks=1

# After a requeue: a file of its own for the output of each run.
if [ -n "${SLURM_RESTART_COUNT:-}" ]; then exec >"slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.$SLURM_RESTART_COUNT.out" 2>&1; fi

case "$SLURM_ARRAY_TASK_ID" in
  0) command=(python train.py --units=32) ;;
  1) command=(python train.py --units=64) ;;
  *) echo "This script has no element $SLURM_ARRAY_TASK_ID." >&2; exit 2 ;;
esac

exec srun --label "${command[@]}"
