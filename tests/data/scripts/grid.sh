#!/bin/bash
# Made by tf4slurm 0.1.0 with:
#   tf4slurm submit --workers 1 --grid lr=0.1,0.01 --grid 'words="a,b",it'"'"'s two' --at-most 2 --label kind=test -- python train.py '--rate={lr}' '--ps={ps_hosts}'

#SBATCH --job-name=train
#SBATCH --open-mode=append
#SBATCH --array=0-3%2
#SBATCH --ntasks=3

# After a requeue: a file of its own for the output of each run.
if [ -n "${SLURM_RESTART_COUNT:-}" ]; then exec >"slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.$SLURM_RESTART_COUNT.out" 2>&1; fi

case "$SLURM_ARRAY_TASK_ID" in
  0) labels=(--label lr=0.1 --label words=a,b) command=(python train.py --rate=0.1 '--ps={ps_hosts}' --words=a,b) ;;
  1) labels=(--label lr=0.1 --label 'words=it'"'"'s two') command=(python train.py --rate=0.1 '--ps={ps_hosts}' '--words=it'"'"'s two') ;;
  2) labels=(--label lr=0.01 --label words=a,b) command=(python train.py --rate=0.01 '--ps={ps_hosts}' --words=a,b) ;;
  3) labels=(--label lr=0.01 --label 'words=it'"'"'s two') command=(python train.py --rate=0.01 '--ps={ps_hosts}' '--words=it'"'"'s two') ;;
  *) echo "This script has no element $SLURM_ARRAY_TASK_ID." >&2; exit 2 ;;
esac

# Each task gets its own values; worker/0 of element 0 runs:
#   python train.py --rate=0.1 --ps=HOST:PORT --words=a,b

exec /opt/tf4slurm/bin/tf4slurm run --site none --workers 1 --name train --label kind=test "${labels[@]}" -- "${command[@]}"
