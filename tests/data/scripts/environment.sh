#!/bin/bash
# Made by tf4slurm 0.1.0 with:
#   tf4slurm submit -n 3 --module cesga/system --module tensorflow/2.11.0 --load-env 'ulimit -n 4096' --venv '/home/my tf' --conda tf --env OMP_NUM_THREADS=4 --env 'WORDS=it'"'"'s two words' --prologue nvidia-smi -- python train.py

#SBATCH --job-name=train
#SBATCH --ntasks=3
#SBATCH --open-mode=append

# After a requeue: a file of its own for the output of each run.
if [ -n "${SLURM_RESTART_COUNT:-}" ]; then exec >"slurm-$SLURM_JOB_ID.$SLURM_RESTART_COUNT.out" 2>&1; fi

type module >/dev/null 2>&1 || . /etc/profile
module load cesga/system || exit 3
module load tensorflow/2.11.0 || exit 3
ulimit -n 4096
. '/home/my tf/bin/activate' || exit 3
eval "$(conda shell.bash hook)" && conda activate tf || exit 3
export OMP_NUM_THREADS=4
export WORDS='it'"'"'s two words'
nvidia-smi

exec python -m tf4slurm run --site none --workers 1 --name train -- python train.py
