#!/bin/bash
# Made by tf4slurm 0.1.0 with:
#   tf4slurm submit -n 4 --requeue 5 --epilogue 'rm -rf /scratch/$USER' -- python train.py

#SBATCH --job-name=train
#SBATCH --ntasks=4
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120

# After a requeue: a file of its own for the output of each run.
if [ -n "${SLURM_RESTART_COUNT:-}" ]; then exec >"slurm-$SLURM_JOB_ID.$SLURM_RESTART_COUNT.out" 2>&1; fi

set -m  # without job control the command would ignore SIGINT
/opt/tf4slurm/bin/tf4slurm run --site none --workers 2 --name train --requeue 5 -- python train.py &
job=$!
set +m
trap 'again=1; kill -ALRM $job' ALRM
trap 'again=1; kill -HUP $job' HUP
trap 'again=1; kill -INT $job' INT
trap 'again=1; kill -QUIT $job' QUIT
trap 'again=1; kill -TERM $job' TERM
trap 'again=1; kill -USR1 $job' USR1
trap 'again=1; kill -USR2 $job' USR2
trap 'again=1; kill -XCPU $job' XCPU
again=1
while [ "$again" ]; do again= code=0; wait "$job" || code=$?; done  # a signal ends the wait, not the job
trap '' ALRM HUP INT QUIT TERM USR1 USR2 XCPU  # Slurm signals every process of a job that it ends
rm -rf /scratch/$USER
exit "$code"
