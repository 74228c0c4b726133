"""Let Optuna choose the points of sweeps on Slurm, and stop the trials that are worse than others at the same epoch.

    python tune_with_optuna.py

Run it on the login host: it submits one job array for each round, and waits for it.
"""

from __future__ import annotations

import argparse
import time

import optuna
from optuna.trial import TrialState

import tf4slurm

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
parser.add_argument("--trials", type=int, default=3, help="of each round, which run at once (default: %(default)s)")
arguments = parser.parse_args()

optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=1),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=5),
)


def suggest(trial):
    return {"lr": trial.suggest_float("lr", 0.05, 10, log=True), "units": trial.suggest_int("units", 8, 64)}


def watch(sweep, trials):
    """Tell Optuna each accuracy while a sweep runs, and stop the elements that it prunes. Return their trials."""
    reported, pruned = set(), []
    while sweep.status().can_change:
        time.sleep(1)
        for trial, run in zip(trials, sweep.results(), strict=True):
            for epoch, accuracy in run.curves.get("accuracy", ()):
                if (trial.number, epoch) not in reported:
                    trial.report(accuracy, int(epoch))
                    reported.add((trial.number, epoch))
            if run.state == "RUNNING" and trial not in pruned and trial.should_prune():
                pruned.append(trial)
                tf4slurm.cancel(run.name)  # this element only
    return pruned


for number in range(arguments.rounds):
    if number == arguments.rounds - 1:
        study.enqueue_trial({"lr": 10, "units": 16})  # a bad one, to see it pruned
    trials = [study.ask() for _ in range(arguments.trials)]
    command = "python tune_digits.py --epochs=60"
    sweep = tf4slurm.Sweep(command, points=map(suggest, trials), ps=0, workers=0, time="10", mem="1G", venv="tf")
    pruned = watch(sweep.submit(), trials)
    for trial, run in zip(trials, sweep.results(), strict=True):
        if trial in pruned:
            study.tell(trial, state=TrialState.PRUNED)
        elif run.exit_code == 0:
            study.tell(trial, run.best["accuracy"])
        else:
            study.tell(trial, state=TrialState.FAIL)
        found = study.trials[trial.number]
        values = f"lr {found.params['lr']:.3f} units {found.params['units']}"
        print(f"{run.name} {values}: {found.state.name} at epoch {run.steps}")

best = study.best_params
print(f"best: accuracy {study.best_value:.3f} with lr {best['lr']:.3f}, units {best['units']}")
