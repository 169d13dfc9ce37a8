"""A script of an Estimator as users write them: TF_CONFIG says who it is, train_and_evaluate() does
the rest.

Feature columns and tf.layers make the model. The chief prints the accuracy of the last checkpoint
at the end.
"""

import argparse
import json
import os

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1


def examples():
    """Whether two words and a number go together."""
    rng = np.random.RandomState(3)
    words, numbers = rng.randint(0, 50, 4000), rng.rand(4000).astype(np.float32)
    return {"word": words, "number": numbers}, ((words % 2) == (numbers > 0.5)).astype(np.int64)


def input_fn(batch=100, repeat=True):
    """Batches of them."""
    dataset = tf.data.Dataset.from_tensor_slices(examples())
    return (dataset.repeat() if repeat else dataset).batch(batch)


def model_fn(features, labels, mode):
    """An embedding and two layers."""
    column = v1.feature_column
    word = column.embedding_column(column.categorical_column_with_identity("word", 50), 4)
    hidden = v1.feature_column.input_layer(features, [word, column.numeric_column("number")])
    logits = v1.layers.dense(v1.layers.dense(hidden, 16, tf.nn.relu), 2)
    loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
    train = v1.train.AdamOptimizer(0.02).minimize(loss, global_step=v1.train.get_global_step())
    accuracy = v1.metrics.accuracy(labels, tf.argmax(logits, 1))
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train, eval_metric_ops={"accuracy": accuracy}
    )


def main():
    """One task."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--protocol", required=True)
    parser.add_argument("--model_dir", required=True)
    flags = parser.parse_args()
    v1.logging.set_verbosity("ERROR")
    config = tf.estimator.RunConfig(
        flags.model_dir,
        protocol=flags.protocol,
        save_checkpoints_steps=200,
        experimental_max_worker_delay_secs=3,
    )
    estimator = tf.estimator.Estimator(model_fn, config=config)
    training = tf.estimator.TrainSpec(input_fn, max_steps=500)
    tf.estimator.train_and_evaluate(
        estimator, training, tf.estimator.EvalSpec(lambda: input_fn(repeat=False))
    )
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "chief":
        found = estimator.evaluate(lambda: input_fn(repeat=False))
        print(f"accuracy {found['accuracy']:.4f} at step {found['global_step']}", flush=True)


if __name__ == "__main__":
    main()
