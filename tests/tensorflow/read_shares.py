"""Two workers under a coordinator read their shares of the files, and together the numbers of the data service."""

import json

import tensorflow as tf

import tf4slurm
from tf4slurm.tensorflow import worker_files

FILES = [f"part-{index}" for index in (3, 1, 4, 0, 2)]
ROWS, READS, ROUNDS = 3, 10, 100

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":
    server = tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc")
    server.join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
service = tf.data.experimental.service


def make_dataset() -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(2 * ROWS * READS * ROUNDS).apply(
        service.distribute(service.ShardingPolicy.DYNAMIC, tf4slurm.data_service(), job_name="numbers")
    )
    return tf.data.Dataset.zip(worker_files(FILES).repeat(), numbers).batch(ROWS)


@tf.function
def read(rows):  # type: ignore[no-untyped-def]
    return (tf.distribute.coordinator.experimental_get_current_worker_index(), *next(rows))


rows = iter(coordinator.create_per_worker_dataset(make_dataset))
result = []
for _ in range(ROUNDS):
    values = coordinator.fetch([coordinator.schedule(read, args=(rows,)) for _ in range(READS)])
    result += [(int(worker), [name.decode() for name in names], numbers.tolist()) for worker, names, numbers in values]
    if {worker for worker, _, _ in result} == {0, 1}:
        break
print(json.dumps({"files": FILES, "read": result}), flush=True)
