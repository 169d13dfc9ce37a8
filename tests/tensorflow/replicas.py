"""A script of the shape of TensorFlow 1's own example of distributed training, "mnist replica", on
data made up here.

Flags say who it is; replica_device_setter puts the variables on the ps; a Supervisor, or
MonitoredTrainingSession, looks after the session; gradients are applied as they come, or by
SyncReplicasOptimizer in step. It names no protocol, and knows none. At the end the chief waits for
all workers, and prints the accuracy on examples that nobody trained on.
"""

import argparse
import time

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
CLASSES, PIXELS, BATCH = 10, 64, 50


def digits(seed, count):
    """Images of ten kinds, with noise, and their labels as one-hot rows."""
    kinds = np.random.RandomState(0).rand(CLASSES, PIXELS)
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, CLASSES, count)
    return (kinds[labels] + rng.normal(0, 0.6, (count, PIXELS))).astype(np.float32), np.eye(
        CLASSES, dtype=np.float32
    )[labels]


def main():
    """One task."""
    parser = argparse.ArgumentParser()
    for name in ("job_name", "ps_hosts", "worker_hosts"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--task_index", type=int, required=True)
    parser.add_argument("--train_steps", type=int, default=300)
    parser.add_argument("--sync_replicas", action="store_true")
    parser.add_argument("--supervisor", action="store_true")
    flags = parser.parse_args()

    v1.disable_eager_execution()
    v1.logging.set_verbosity("ERROR")
    workers = flags.worker_hosts.split(",")
    cluster = tf.train.ClusterSpec({"ps": flags.ps_hosts.split(","), "worker": workers})
    server = v1.train.Server(cluster, job_name=flags.job_name, task_index=flags.task_index)
    if flags.job_name == "ps":
        server.join()

    is_chief = flags.task_index == 0
    worker_device = f"/job:worker/task:{flags.task_index}"
    with v1.device(
        v1.train.replica_device_setter(
            worker_device=worker_device, ps_device="/job:ps/cpu:0", cluster=cluster
        )
    ):
        global_step = v1.train.get_or_create_global_step()
        hid_w = v1.Variable(v1.truncated_normal([PIXELS, 32], stddev=0.1, seed=1), name="hid_w")
        hid_b = v1.Variable(tf.zeros([32]), name="hid_b")
        sm_w = v1.Variable(v1.truncated_normal([32, CLASSES], stddev=0.1, seed=2), name="sm_w")
        sm_b = v1.Variable(tf.zeros([CLASSES]), name="sm_b")
        x = v1.placeholder(tf.float32, [None, PIXELS])
        labels = v1.placeholder(tf.float32, [None, CLASSES])
        y = tf.nn.softmax(v1.nn.xw_plus_b(tf.nn.relu(v1.nn.xw_plus_b(x, hid_w, hid_b)), sm_w, sm_b))
        cross_entropy = -tf.reduce_sum(labels * v1.log(tf.clip_by_value(y, 1e-10, 1.0))) / BATCH
        accuracy = tf.reduce_mean(
            tf.cast(tf.equal(tf.argmax(y, 1), tf.argmax(labels, 1)), tf.float32)
        )
        optimizer = v1.train.AdamOptimizer(0.01)
        if flags.sync_replicas:
            optimizer = v1.train.SyncReplicasOptimizer(optimizer, len(workers), len(workers))
        train_step = optimizer.minimize(cross_entropy, global_step=global_step)
        # in step: who reads it before, and sees no end, takes the other's last token
        with tf.control_dependencies([train_step]):
            step_after = global_step.read_value()
    with v1.device("/job:ps/task:0"):
        done = v1.FIFOQueue(len(workers), tf.int32, shared_name="done")
        is_done, one_done = done.enqueue(1), done.dequeue()

    rng_seed = 100 + flags.task_index
    train_x, train_y = digits(rng_seed, 4000)
    config = v1.ConfigProto(allow_soft_placement=True, device_filters=["/job:ps", worker_device])

    def train(session):
        step, turn = 0, 0
        while step < flags.train_steps:
            at = turn * BATCH % len(train_x)
            step = session.run(
                step_after, {x: train_x[at : at + BATCH], labels: train_y[at : at + BATCH]}
            )
            turn += 1
        print(f"worker {flags.task_index}: {turn} of {step} steps", flush=True)
        session.run(is_done)
        if is_chief:
            for _ in workers:
                session.run(one_done)
            test_x, test_y = digits(7, 4000)
            print(f"accuracy {session.run(accuracy, {x: test_x, labels: test_y}):.4f}", flush=True)

    if not flags.supervisor:
        if not is_chief:
            uninitialized = v1.report_uninitialized_variables(v1.global_variables())
            with v1.Session(server.target, config=config) as session:
                # MonitoredTrainingSession would look every 30 s only
                while session.run(uninitialized).size:
                    time.sleep(0.1)
        hooks = [optimizer.make_session_run_hook(is_chief)] if flags.sync_replicas else []
        with v1.train.MonitoredTrainingSession(
            server.target, is_chief, hooks=hooks, config=config, stop_grace_period_secs=1
        ) as session:  # a queue runner in step waits for gradients that do not come
            train(session)
        return
    ready, local_init = v1.train.Supervisor.USE_DEFAULT, v1.train.Supervisor.USE_DEFAULT
    if flags.sync_replicas:
        local_init = optimizer.chief_init_op if is_chief else optimizer.local_step_init_op
        ready = optimizer.ready_for_local_init_op
        runner, tokens = optimizer.get_chief_queue_runner(), optimizer.get_init_tokens_op()
    supervisor = v1.train.Supervisor(
        is_chief=is_chief,
        init_op=v1.global_variables_initializer(),
        recovery_wait_secs=1,
        global_step=global_step,
        local_init_op=local_init,
        ready_for_local_init_op=ready,
    )
    session = supervisor.prepare_or_wait_for_session(server.target, config=config)
    if flags.sync_replicas and is_chief:
        session.run(tokens)
        supervisor.start_queue_runners(session, [runner])
    train(session)


if __name__ == "__main__":
    main()
