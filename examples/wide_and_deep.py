"""Who arrives late? A wide-and-deep model of the flights that left New York City in 2013, in the
style of TensorFlow 1.

    prpc run --ps 1 --workers 2 examples/wide_and_deep.py                  over prpc
    prpc run --ps 1 --workers 2 --protocol grpc examples/wide_and_deep.py  over TensorFlow's own
                                                                           servers

The wide part is linear over nine categories (carrier, plane, airports, hour, ...), the deep part a
network over an embedding of each. Variables live on the ps; each worker trains on batches of its
own, and worker 0 prints the AUC of the test flights at the end. There is nothing of prpc in it but
the data: which protocol its servers speak is said where it is started, or by --protocol.
"""

import argparse
import json
import os
import time

import numpy as np
import tensorflow as tf

from prpc_engine.demo.data import FIELDS, NUMERIC, load_flights
from prpc_engine.demo.model import auc

START_S_MAX = 300  # for worker 0 to make the variables
v1 = tf.compat.v1
columns = v1.feature_column


def build(features, labels, sizes):
    """The logits, the loss and the op that trains."""
    categories = [
        columns.categorical_column_with_identity(field, size) for field, size in sizes.items()
    ]
    wide = columns.linear_model(features, categories)
    embedded = [columns.embedding_column(one, 8) for one in categories]
    deep = columns.input_layer(
        features, [*embedded, columns.numeric_column("numeric", [len(NUMERIC)])]
    )
    for units in (32, 16):
        deep = v1.layers.dense(deep, units, tf.nn.relu)
    logits = tf.squeeze(wide + v1.layers.dense(deep, 1), 1)
    loss = v1.losses.sigmoid_cross_entropy(labels, logits)
    step = v1.train.get_or_create_global_step()
    wide_variables = v1.trainable_variables("linear_model")
    deep_variables = [
        one for one in v1.trainable_variables() if all(one is not other for other in wide_variables)
    ]
    train = tf.group(
        v1.train.FtrlOptimizer(0.1).minimize(loss, var_list=wide_variables),
        v1.train.AdagradOptimizer(0.05).minimize(loss, global_step=step, var_list=deep_variables),
    )
    return logits, loss, train


def batches(examples, size, worker, workers):
    """This worker's share of the flights, in a new order each time round."""
    rng = np.random.default_rng(worker)
    while True:
        order = rng.permutation(len(examples))[worker::workers]
        for begin in range(0, len(order) - size + 1, size):
            yield examples.take(order[begin : begin + size])


def main():
    """A task of the cluster in TF_CONFIG."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--protocol", help="of the servers (default: none is named)")
    parser.add_argument("--steps", type=int, default=800, help="of all workers together")
    parser.add_argument("--batch", type=int, default=1024, help="flights")
    parser.add_argument("--rows", type=int, help="flights to read (default: all)")
    args = parser.parse_args()

    v1.disable_eager_execution()
    v1.logging.set_verbosity("ERROR")
    config = json.loads(os.environ["TF_CONFIG"])
    job, index = config["task"]["type"], config["task"]["index"]
    cluster = tf.train.ClusterSpec(config["cluster"])
    server = v1.train.Server(cluster, job_name=job, task_index=index, protocol=args.protocol)
    if job == "ps":
        server.join()

    flights = load_flights(args.rows)
    # a key's highest byte is its field
    firsts = np.searchsorted(flights.vocabulary >> 56, range(len(FIELDS)))
    sizes = {
        field: int(size)
        for field, size in zip(FIELDS, np.diff([*firsts, len(flights.vocabulary)]), strict=True)
    }
    v1.set_random_seed(1)
    with v1.device(
        v1.train.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")
    ):
        features = {field: v1.placeholder(tf.int64, [None, 1], field) for field in FIELDS}
        features["numeric"] = v1.placeholder(tf.float32, [None, len(NUMERIC)], "numeric")
        labels = v1.placeholder(tf.float32, [None], "labels")
        logits, loss, train = build(features, labels, sizes)

    def feed(examples):
        ordinals = examples.ordinals - firsts
        fed = {features[field]: ordinals[:, [number]] for number, field in enumerate(FIELDS)}
        return {**fed, features["numeric"]: examples.numeric, labels: examples.labels}

    # no worker waits for another one
    only = v1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{index}"])
    if index:
        uninitialized = v1.report_uninitialized_variables()
        with v1.Session(server.target, config=only) as session:
            until = time.monotonic() + START_S_MAX
            # MonitoredTrainingSession would take such a look every 30 s
            while session.run(uninitialized).size:
                if time.monotonic() > until:
                    raise SystemExit(
                        f"worker {index}: worker 0 has initialized nothing within {START_S_MAX} s"
                    )
                time.sleep(0.1)
    hooks = [v1.train.StopAtStepHook(last_step=args.steps)]
    with v1.train.MonitoredTrainingSession(
        server.target, is_chief=index == 0, hooks=hooks, config=only
    ) as session:
        step = v1.train.get_global_step()
        for count, batch in enumerate(
            batches(flights.train, args.batch, index, cluster.num_tasks("worker"))
        ):
            _, now, at = session.run([train, loss, step], feed(batch))
            if count % 100 == 0:
                print(f"worker {index}: step {at} of {args.steps}, loss {now:.4f}", flush=True)
            if session.should_stop():
                break
    if index == 0:
        with v1.Session(server.target, config=only) as session:
            scores = session.run(logits, feed(flights.test))
        print(f"test AUC {auc(flights.test.labels, scores):.4f}", flush=True)


if __name__ == "__main__":
    main()
