import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.demo.data import FIELDS, NUMERIC, Examples
from prpc_engine.demo.model import Batch, auc, forward, forward_backward, log_loss, prepare, sigmoid

VOCABULARY = np.arange(100, 130) ** 3


def make_examples(count: int, seed: int = 0) -> Examples:
    random = np.random.default_rng(seed)
    return Examples(
        random.integers(0, len(VOCABULARY), (count, len(FIELDS))).astype(np.int32),
        random.normal(size=(count, len(NUMERIC))).astype(np.float32),
        random.integers(0, 2, count).astype(np.float32),
    )


def make_values(batch: Batch, dim: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(len(batch.keys), 1 + dim)).astype(np.float32) / 2
    return rows, random.normal(size=1 + len(NUMERIC)).astype(np.float32)


def test_a_prepared_batch_knows_each_examples_keys() -> None:
    examples = make_examples(7)
    batch = prepare(examples, VOCABULARY)
    assert (np.diff(batch.keys) > 0).all()
    np.testing.assert_array_equal(batch.keys[batch.places].T, VOCABULARY[examples.ordinals])


def test_the_logit_is_what_rendles_sum_over_pairs_says() -> None:
    batch = prepare(make_examples(5), VOCABULARY)
    rows, dense = make_values(batch, dim=3)
    logits, _ = forward(rows, dense, batch)
    for i in range(5):
        used = [rows[place] for place in batch.places[:, i]]
        expected = dense[0] + dense[1:] @ batch.numeric[i] + sum(row[0] for row in used)
        expected += sum(
            one[1:] @ other[1:] for k, one in enumerate(used) for other in used[k + 1 :]
        )
        assert logits[i] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_gradients_are_those_of_finite_differences() -> None:
    batch = prepare(make_examples(40), VOCABULARY)
    rows, dense = make_values(batch, dim=3)
    rows.flags.writeable = dense.flags.writeable = False
    gradients = forward_backward(rows, dense, batch)
    assert gradients.rows.shape == rows.shape

    def loss(rows: np.ndarray, dense: np.ndarray) -> float:
        logits, _ = forward(rows, dense, batch)
        return float(np.mean(log_loss(logits.astype(np.float64), batch.labels)))

    wide_rows, wide_dense, step = rows.astype(np.float64), dense.astype(np.float64), 1e-4
    for values, computed in ((wide_rows, gradients.rows), (wide_dense, gradients.dense)):
        measured = np.empty(values.shape)
        for place in np.ndindex(values.shape):
            kept = values[place]
            values[place] = kept + step
            above = loss(wide_rows, wide_dense)
            values[place] = kept - step
            measured[place] = (above - loss(wide_rows, wide_dense)) / (2 * step)
            values[place] = kept
        np.testing.assert_allclose(computed, measured, atol=2e-4)


def test_the_loss_is_the_mean_log_loss() -> None:
    batch = prepare(make_examples(40), VOCABULARY)
    rows, dense = make_values(batch, dim=2)
    probabilities = sigmoid(forward(rows, dense, batch)[0])
    chosen = np.where(batch.labels > 0, probabilities, 1 - probabilities)
    assert forward_backward(rows, dense, batch).loss == pytest.approx(
        -np.log(chosen).mean(), rel=1e-4
    )


def test_sure_answers_neither_overflow_nor_lose_their_loss() -> None:
    logits = np.array([-200, 200, -200, 200], np.float32)
    labels = np.array([0, 1, 1, 0], np.float32)
    assert log_loss(logits, labels).tolist() == [0, 0, 200, 200]
    assert sigmoid(logits).tolist() == [0, 1, 0, 1]


scored = st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=40).filter(
    lambda pairs: len({label for label, _ in pairs}) == 2
)


@given(scored)
def test_auc_is_the_share_of_pairs_in_order_with_ties_as_one_half(
    pairs: list[tuple[bool, int]],
) -> None:
    late = [score for label, score in pairs if label]
    other = [score for label, score in pairs if not label]
    wins = sum((a > b) + (a == b) / 2 for a in late for b in other)
    labels, scores = np.array(pairs, np.float32).T
    assert auc(labels, scores) == pytest.approx(wins / (len(late) * len(other)))


def test_auc_of_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="both classes; of 3 labels 0 are positive"):
        auc(np.zeros(3, np.float32), np.arange(3, dtype=np.float32))
