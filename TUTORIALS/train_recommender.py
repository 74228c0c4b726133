"""Predict clicks with two large embedding tables, of 10 million rows together, that are split over the ps.

    tf4slurm run --ps 2 --workers 2 --max-attempts 3 -- python TUTORIALS/train_recommender.py

What this script shows:

* A step looks up and updates only the few thousand rows of its batch: workers never receive a whole table. So the
  tables may be as large as the memory of all ps together, and the cost of a step does not grow with them.
* `sharding="fixed-shards"` splits each table by its rows. Popular rows should be spread over all ps, or the first ps
  would do most of the work; here, as with hashed ids, they are.
* Each row has a learning rate of its own (Adagrad, with one number per row in place of sixteen), because popular
  rows occur in every step and others once a day. It is written out below: optimizers of Keras 3 cannot use split
  variables.
* When a ps fails, its rows are lost. `Checkpoints` lets each ps save its own part, and the next attempt resumes from
  there: so give the job --max-attempts, and a directory that all ps see.

The clicks follow a known rule (`log_odds`), so the best possible prediction is known too: the AUC of the rule itself.
Both are printed at the end. AUC is the chance that a click gets a higher score than a non-click.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it at import

import numpy as np
import tensorflow as tf

from tf4slurm.tensorflow import Checkpoints, parameter_server_strategy, run_steps

WIDTH = 16  # numbers in a row: the first is the bias of the row, the others form a dot product with the other table
LEARNING_RATE = 0.3
FIRST_SQUARE = 0.1  # initial sum of squares: the smaller, the larger the first updates of a row
SPREAD = 15_485_863  # a prime, so that ids of neighbouring popularity are far apart


class Impressions(NamedTuple):
    """Users, the items shown to them, and clicks (0.0 or 1.0): three tensors of shape (count,)."""

    users: tf.Tensor
    items: tf.Tensor
    clicks: tf.Tensor


class Table(NamedTuple):
    """Rows of shape (count, WIDTH), and for each row the sum of squares of its gradients, of shape (count, 1)."""

    rows: Any
    squares: Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model of clicks on parameter servers.")
    parser.add_argument("--users", type=int, default=6_000_000, help="rows of the first table (default: %(default)s)")
    parser.add_argument("--items", type=int, default=4_000_000, help="rows of the second table (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2_000, help="steps in total (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8_192, help="impressions per step (default: %(default)s)")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("recommender-checkpoints"), help="directory (default: %(default)s)"
    )
    parser.add_argument(
        "--save-every", type=int, default=1_000, metavar="STEPS", help="save every so many steps (default: %(default)s)"
    )
    parser.add_argument("--report-json", type=Path, help="write steps, seconds and both AUCs to this file")
    return parser.parse_args()


def popular(count: int, uniform: tf.Tensor) -> tf.Tensor:
    """Return ids below `count`: the frequency of an id falls as 1 / its rank, and ranks are spread over the table."""
    rank = tf.cast(tf.pow(tf.cast(count + 1, tf.float64), uniform), tf.int64) - 1
    return tf.minimum(rank, count - 1) * SPREAD % count


def trait(ids: tf.Tensor, number: float) -> tf.Tensor:
    """Return a pseudo-random number from -1 to 1 for each id, always the same."""
    product = tf.sin(tf.cast(ids, tf.float64) * 12.9898 + number * 78.233) * 43_758.5453
    return 2 * (product - tf.floor(product)) - 1


def log_odds(users: tf.Tensor, items: tf.Tensor) -> tf.Tensor:
    """Return the log odds of a click: a bias per user, a bias per item, and the agreement of two tastes."""
    tastes = sum(trait(users, number) * trait(items, number + 0.5) for number in (2, 3))
    return 1.5 * (trait(users, 1) + trait(items, 1.5)) + 3 * tastes


def make_impressions(users: int, items: int, count: int, seed: tf.Tensor) -> Impressions:
    """Return `count` impressions with clicks drawn from the rule; the same for the same two numbers of `seed`."""
    chance = tf.random.stateless_uniform([3, count], seed, dtype=tf.float64)
    who, what = popular(users, chance[0]), popular(items, chance[1])
    return Impressions(who, what, tf.cast(chance[2] < tf.sigmoid(log_odds(who, what)), tf.float32))


def make_table(rows: int, seed: int) -> Table:
    """Create the variables. Call it in the strategy's scope, which splits them: each ps creates its own part.

    A single ps has the whole table, and TensorFlow then passes no shard_info.
    """

    @tf.function  # keeps the part in memory once: without it each operation would make another copy
    def small(shard_info: Any = None) -> tf.Tensor:
        shape, first_row = (shard_info.shape, shard_info.offset[0]) if shard_info else ((rows, WIDTH), 0)
        return tf.random.stateless_uniform(shape, [seed, first_row], -0.2, 0.2)

    def first_square(shard_info: Any = None) -> tf.Tensor:
        return tf.fill(shard_info.shape if shard_info else (rows, 1), FIRST_SQUARE)

    return Table(
        tf.Variable(small, shape=(rows, WIDTH), dtype=tf.float32),
        tf.Variable(first_square, shape=(rows, 1), dtype=tf.float32),
    )


def scores(user_rows: tf.Tensor, item_rows: tf.Tensor) -> tf.Tensor:
    """Return the predicted log odds, from rows of shape (count, WIDTH)."""
    return user_rows[:, 0] + item_rows[:, 0] + tf.reduce_sum(user_rows[:, 1:] * item_rows[:, 1:], axis=1)


def change(table: Table, ids: tf.Tensor, gradient: tf.Tensor) -> None:
    """Apply one step of Adagrad to these rows; `ids` are unique."""
    square = tf.reduce_mean(gradient**2, axis=1, keepdims=True)
    squares = square + tf.nn.embedding_lookup(table.squares, ids)
    table.squares.scatter_add(tf.IndexedSlices(square, ids))
    table.rows.scatter_sub(tf.IndexedSlices(LEARNING_RATE * gradient / tf.sqrt(squares), ids))


def train_step(users: Table, items: Table, impressions: Impressions) -> tf.Tensor:
    """Train on one batch, on a worker; return the mean loss."""
    user_ids, user_places = tf.unique(impressions.users)  # a row that occurs a thousand times is fetched once
    item_ids, item_places = tf.unique(impressions.items)
    user_rows = tf.nn.embedding_lookup(users.rows, user_ids)
    item_rows = tf.nn.embedding_lookup(items.rows, item_ids)
    with tf.GradientTape() as tape:
        tape.watch((user_rows, item_rows))
        predicted = scores(tf.gather(user_rows, user_places), tf.gather(item_rows, item_places))
        losses = tf.nn.sigmoid_cross_entropy_with_logits(impressions.clicks, predicted)
        loss = tf.reduce_sum(losses)
    user_gradient, item_gradient = tape.gradient(loss, (user_rows, item_rows))
    change(users, user_ids, tf.convert_to_tensor(user_gradient))
    change(items, item_ids, tf.convert_to_tensor(item_gradient))
    return tf.reduce_mean(losses)


def area_under_curve(scores: np.ndarray, clicks: np.ndarray) -> float:
    """Return the AUC: the share of pairs of a click and a non-click in which the click has the higher score."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = clicks > 0.5
    count = int(positive.sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(clicks) - count)))


def evaluate(users: Table, items: Table, sizes: tuple[int, int]) -> tuple[float, float]:
    """Return the AUC on impressions that no step has seen, and that of the rule itself."""
    test = make_impressions(*sizes, 200_000, tf.constant([0, 0]))
    # In a function the ps look up the rows; outside of one, the chief would fetch whole tables.
    predict = tf.function(lambda: scores(*map(tf.nn.embedding_lookup, (users.rows, items.rows), test[:2])))
    clicks = test.clicks.numpy()
    return area_under_curve(predict().numpy(), clicks), area_under_curve(log_odds(*test[:2]).numpy(), clicks)


def main() -> None:
    arguments = parse_arguments()
    sizes = (arguments.users, arguments.items)
    strategy, coordinator = parameter_server_strategy(sharding="fixed-shards")  # never returns on a ps or worker
    tf.get_logger().setLevel("ERROR")  # else every checkpoint saved to a ps warns that it traces a function
    with strategy.scope():
        users, items = (make_table(rows, seed) for seed, rows in enumerate(sizes))
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
    checkpoints = Checkpoints(
        arguments.checkpoints, step=step, every_steps=arguments.save_every, keep=2, users=users, items=items
    )
    first_step = int(step.numpy())
    if checkpoints.restored:
        print(f"going on from step {first_step}", flush=True)

    def make_dataset() -> tf.data.Dataset:
        # Endless new impressions, different on each worker; the seed [0, 0] is reserved for the test.
        worker = tf.cast(tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64) + 1
        numbers = tf.data.Dataset.counter(first_step)
        return numbers.map(lambda n: make_impressions(*sizes, arguments.batch_size, tf.stack([worker, n]))).prefetch(4)

    batches = iter(coordinator.create_per_worker_dataset(tf.function(make_dataset)))
    done = run_steps(
        coordinator,
        lambda batch: train_step(users, items, batch),
        arguments.steps,
        dataset=batches,
        checkpoints=checkpoints,
    )
    if done.is_stopped:
        print(f"asked to stop: saved at step {done.step}", flush=True)
        return
    reached, possible = evaluate(users, items, sizes)
    rate = done.steps * arguments.batch_size / done.seconds
    print(f"{done.steps} steps in {done.seconds:.0f} s, {rate:,.0f} impressions a second with saving", flush=True)
    print(f"AUC {reached:.4f}; the rule itself reaches {possible:.4f}", flush=True)
    if arguments.report_json:
        figures = {"steps": done.steps, "seconds": done.seconds, "auc": reached, "possible_auc": possible}
        arguments.report_json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
