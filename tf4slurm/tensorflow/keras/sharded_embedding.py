"""Provide `ShardedEmbedding`, a Keras 3 layer with an embedding table in slices on the ps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf4slurm.tensorflow.closures import count_tasks
from tf4slurm.tensorflow.variable_placement import on_different_ps

_TABLE = "table"


class ShardedEmbedding(keras.layers.Layer):  # type: ignore[misc]
    """Turns integer ids into vectors, as keras.layers.Embedding does, with a table that is split over several ps.

    Each slice is a range of rows, which its ps looks up and updates. So a worker receives only the rows of its batch,
    while `keras.layers.Embedding` sends the whole table to the worker in every step.

    Keras saves the table as one variable. A process without ps, or a job with another number of ps, can load it.
    `Checkpoints`, as any tf.train.Checkpoint, saves the slices. To restore them on another number of ps, give the
    same number of `slices`.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        slices: int | None = None,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        **options: Any,
    ) -> None:
        """Store the arguments. The variables are created when the layer is first used.

        Args:
            input_dim: Number of rows of the table. The ids are 0 to input_dim - 1.
            output_dim: Length of each vector.
            slices: Number of slices (default: the number of ps of the current strategy, or 1 without ps).
            embeddings_initializer: Initializer of each slice.
            embeddings_regularizer: Regularizer of each slice. It reads the whole table in every step.
            options: Arguments of keras.layers.Layer.

        Raises:
            ValueError: `slices` is less than 1, or greater than the number of rows.
        """
        super().__init__(**options)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.slices = _count_ps() if slices is None else slices
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self._slices: list[Any] = []
        if not 1 <= self.slices <= input_dim:
            raise ValueError(f"slices is {self.slices}: expected 1 to {input_dim}, the number of rows.")

    def build(self, input_shape: Any = None) -> None:
        """Create one variable per slice."""
        rows = [len(each) for each in np.array_split(np.arange(self.input_dim), self.slices)]
        with on_different_ps():
            self._slices = [
                self.add_weight(
                    shape=(count, self.output_dim),
                    initializer=self.embeddings_initializer,
                    regularizer=self.embeddings_regularizer,
                    name=f"embeddings_{index}",
                )
                for index, count in enumerate(rows)
            ]
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Return the vectors of these ids, in a new last axis of length output_dim."""
        slices = [each.value for each in self._slices]
        ids = tf.cast(inputs, tf.int64)
        return tf.cast(tf.nn.embedding_lookup(slices, ids), self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """Return the shape of the result of `call`."""
        return (*input_shape, self.output_dim)

    def save_own_variables(self, store: Any) -> None:
        """Save the table as one variable, in a `.keras` or `.weights.h5` file."""
        store[_TABLE] = np.concatenate([np.asarray(each.numpy()) for each in self._slices])

    def load_own_variables(self, store: Any) -> None:
        """Load the table, which may have had any number of slices. Raise ValueError if it has another shape."""
        table, expected = np.asarray(store[_TABLE]), (self.input_dim, self.output_dim)
        if table.shape != expected:
            raise ValueError(f"The saved table of {self.name} has the shape {table.shape}: expected {expected}.")
        for each, rows in zip(self._slices, np.array_split(table, self.slices), strict=True):
            each.assign(rows)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, from which Keras creates the layer again."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "slices": self.slices,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
        }


def _count_ps() -> int:
    is_on_ps = isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy)
    return count_tasks("ps") if is_on_ps else 1


keras.saving.register_keras_serializable("tf4slurm")(ShardedEmbedding)
