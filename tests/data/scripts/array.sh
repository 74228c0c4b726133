#!/bin/bash
# Made by tf4slurm 0.1.0 with:
#   tf4slurm submit --workers 1 --array-args /data/arguments.txt --array 0-2%2 -- python train.py

#SBATCH --job-name=train
#SBATCH --array=0-2%2
#SBATCH --open-mode=append
#SBATCH --ntasks=3

# After a requeue: a file of its own for the output of each run.
if [ -n "${SLURM_RESTART_COUNT:-}" ]; then exec >"slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.$SLURM_RESTART_COUNT.out" 2>&1; fi

case "$SLURM_ARRAY_TASK_ID" in
  0) labels=(--label 'arguments=--rate 0.1') arguments=(--rate 0.1) ;;
  1) labels=(--label 'arguments=--words '"'"'two words'"'"'') arguments=(--words 'two words') ;;
  2) labels=(--label arguments=--plain) arguments=(--plain) ;;
  *) echo "This script has no element $SLURM_ARRAY_TASK_ID." >&2; exit 2 ;;
esac

exec /opt/tf4slurm/bin/tf4slurm run --site none --workers 1 --name train "${labels[@]}" -- python train.py "${arguments[@]}"
