#!/bin/bash
# Made by tf4slurm 0.1.0 with:
#   tf4slurm submit --het -N 2 --workers 3 --gpus-per-worker 2 -p gpu -c 8 --mem 64G --ps-sbatch partition=cpu --ps-sbatch mem-per-cpu=2G --gpu-flag gres --gpu-type a100 -- python train.py

#SBATCH --job-name=train
#SBATCH --cpus-per-task=8
#SBATCH --partition=cpu
#SBATCH --open-mode=append
#SBATCH --mem-per-cpu=2G
#SBATCH --ntasks=1
#SBATCH hetjob
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --cpus-per-task=8
#SBATCH --partition=gpu
#SBATCH --mem=64G
#SBATCH --open-mode=append
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:a100:4

# After a requeue: a file of its own for the output of each run.
if [ -n "${SLURM_RESTART_COUNT:-}" ]; then exec >"slurm-$SLURM_JOB_ID.$SLURM_RESTART_COUNT.out" 2>&1; fi

exec /opt/tf4slurm/bin/tf4slurm run --site none --workers 3 --placement ps,chief,worker,worker,worker --gpus-per-worker 2 --name train -- python train.py
