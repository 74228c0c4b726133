"""The reference suite: what `fit` trains on a cluster, compared with Keras in one process."""
