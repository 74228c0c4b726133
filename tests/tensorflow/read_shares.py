"""Two workers under a coordinator read: names of files, each its share; and numbers of the data service, together."""

import json

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

import tf4slurm
from tf4slurm.tensorflow.files import worker_files

FILES = [f"part-{index}" for index in (3, 1, 4, 0, 2)]
READS = 60

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":
    server = tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc")
    server.join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
service = tf.data.experimental.service


def make_dataset() -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(10 * READS).apply(
        service.distribute(service.ShardingPolicy.DYNAMIC, tf4slurm.data_service(), job_name="numbers")
    )
    return tf.data.Dataset.zip(worker_files(FILES).repeat(), numbers)


@tf.function
def read(rows):  # type: ignore[no-untyped-def]
    return (tf.distribute.coordinator.experimental_get_current_worker_index(), *next(rows))


rows = iter(coordinator.create_per_worker_dataset(make_dataset))
values = coordinator.fetch([coordinator.schedule(read, args=(rows,)) for _ in range(READS)])
result = [(int(worker), name.decode(), int(number)) for worker, name, number in values]
print(json.dumps({"files": FILES, "read": result}), flush=True)
