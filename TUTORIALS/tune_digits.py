"""Train a small network in one process, with numpy: a script whose arguments are to be tuned.

    tf4slurm run --grid lr=0.1,1 --grid units=8,32 --ps 0 --workers 0 -- python tune_digits.py

With --directory it saves there, and resumes from there.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import digits
import numpy as np

import tf4slurm

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: %(default)s)")
parser.add_argument("--units", type=int, default=16, help="of the hidden layer (default: %(default)s)")
parser.add_argument("--epochs", type=int, default=30, help="passes over the images (default: %(default)s)")
parser.add_argument("--directory", type=Path, help="where to save the weights")
arguments = parser.parse_args()

data = digits.load()
images, test_images = data.train_images.reshape(-1, 64), data.test_images.reshape(-1, 64)
random = np.random.default_rng(0)
weights = {"hidden": random.normal(0, 0.2, (64, arguments.units)), "out": random.normal(0, 0.2, (arguments.units, 10))}
epoch = 0


def predict(rows):
    """Return the values of the hidden layer, and the probability of each digit."""
    hidden = np.maximum(rows @ weights["hidden"], 0)
    logits = hidden @ weights["out"]
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def train_step(rows, labels):
    hidden, probabilities = predict(rows)
    error = (probabilities - np.eye(10)[labels]) / len(rows)
    back = (error @ weights["out"].T) * (hidden > 0)
    weights["out"] -= arguments.lr * hidden.T @ error
    weights["hidden"] -= arguments.lr * rows.T @ back
    return -np.log(probabilities[np.arange(len(rows)), labels] + 1e-9).mean()


def save():
    if arguments.directory:
        arguments.directory.mkdir(parents=True, exist_ok=True)
        np.savez(arguments.directory / "new.npz", epoch=epoch, **weights)
        os.replace(arguments.directory / "new.npz", arguments.directory / "weights.npz")


if arguments.directory and (arguments.directory / "weights.npz").exists():
    weights = dict(np.load(arguments.directory / "weights.npz"))
    epoch = int(weights.pop("epoch"))
    print("resuming from epoch", epoch)

while epoch < arguments.epochs and not tf4slurm.should_stop():
    batches = np.array_split(random.permutation(len(images)), 24)
    loss = np.mean([train_step(images[rows], data.train_labels[rows]) for rows in batches])
    time.sleep(0.1)  # as if the network was larger
    epoch += 1
    accuracy = np.mean(predict(test_images)[1].argmax(axis=1) == data.test_labels)
    tf4slurm.report(step=epoch, loss=float(loss), accuracy=float(accuracy))
    print(f"epoch {epoch} loss {loss:.3f} accuracy {accuracy:.3f}", flush=True)
    if epoch % 5 == 0:
        save()
save()
