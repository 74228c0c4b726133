#!/bin/bash
# Made by tf4slurm 0.1.0 with:
#   tf4slurm submit -J digits -N2 -n 5 --ntasks-per-node 3 -c 4 -p short -A me -q short -t 2-00:00:00 -C 'a100&ib' -w 'c206-[3-4]' -x c206-9 --mem-per-cpu 3G --gres gpu:a100:2 --exclusive --reservation course -o logs/%x-%j.out --after 12 --after 13_4 --dependency singleton --mail-type END,FAIL --mail-user me@example.org --signal USR2@300 --sbatch --nice=100 --sbatch 'comment=it'"'"'s two' --sbatch chdir=/work --no-sbatch qos --srun cpu-bind=cores --srun label --ps 2 --evaluators 1 --no-chief --placement spread --gpus-per-worker 1 --runs-directory '/scratch/my runs' --interface 'ib*' --ports 40000-40009,40020 --control-port 40500 --start-timeout 60 --heartbeat-timeout 5.5 --heartbeat-interval 0.25 --max-worker-restarts 0 --max-attempts 3 --grace-period 0 --stop-signal SIGUSR1 --finish-timeout 10 --stall-timeout 600 --require-servers --python /opt/py/bin/python -- python 'my train.py' --words 'it'"'"'s "two"' '$HOME' '*' '' $'two\x0alines' -- $'\x0d\x0a'

#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks=5
#SBATCH --ntasks-per-node=3
#SBATCH --cpus-per-task=4
#SBATCH --partition=short
#SBATCH --account=me
#SBATCH --time=2-00:00:00
#SBATCH --constraint='a100&ib'
#SBATCH --nodelist='c206-[3-4]'
#SBATCH --exclude=c206-9
#SBATCH --mem-per-cpu=3G
#SBATCH --gres=gpu:a100:2
#SBATCH --reservation=course
#SBATCH --output=logs/%x-%j.out
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --signal=B:USR2@300
#SBATCH --exclusive
#SBATCH --dependency=afterok:12:13_4,singleton
#SBATCH --nice=100
#SBATCH --comment='it'"'"'s two'
#SBATCH --chdir=/work
#SBATCH --open-mode=append

exec /opt/py/bin/python -m tf4slurm run --site none --ps 2 --workers 2 --evaluators 1 --no-chief --placement spread --gpus-per-worker 1 --name digits --runs-directory '/scratch/my runs' --interface 'ib*' --ports 40000-40009,40020 --control-port 40500 --start-timeout 60 --heartbeat-timeout 5.5 --heartbeat-interval 0.25 --max-worker-restarts 0 --max-attempts 3 --grace-period 0 --stop-signal SIGUSR1 --finish-timeout 10 --stall-timeout 600 --require-servers --srun cpu-bind=cores --srun label -- python 'my train.py' --words 'it'"'"'s "two"' '$HOME' '*' '' $'two\x0alines' -- $'\x0d\x0a'
