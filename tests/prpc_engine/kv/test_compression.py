import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.errors import Backpressure, BadArguments, ConfigError
from prpc_engine.kv.table import compression
from prpc_engine.kv.table.compression import Cast, Compressor, Feedback, Int8, TopK
from tests.prpc_engine.processes import PATIENCE_S

EVERY = [Cast(), Cast("float16"), Int8(), Int8(block=3), TopK(), TopK(1.0)]


def gradients(*shape: int) -> np.ndarray:
    grads = np.random.default_rng(4).normal(size=shape).astype(np.float32)
    grads.flags.writeable = False
    return grads


def taken(*parts: np.ndarray) -> tuple[np.ndarray, ...]:
    """A push that sends them."""
    return parts


@pytest.mark.parametrize("made", EVERY, ids=str)
@pytest.mark.parametrize("shape", [(1000,), (7, 13), (1,), ()])
def test_what_comes_back_has_the_shape_and_few_bytes_went(
    made: Compressor, shape: tuple[int, ...]
) -> None:
    grads = gradients(*shape)
    parts = made.encode(grads)
    back = made.decode(parts, shape)
    assert back.shape == shape
    assert back.dtype == np.float32
    if shape == (1000,) and made not in (TopK(1.0), Int8(block=3)):
        assert sum(part.nbytes for part in parts) <= grads.nbytes / 2


@pytest.mark.parametrize("made", [Cast(), Cast("float16"), Int8(), TopK()], ids=str)
def test_nothing_is_nothing(made: Compressor) -> None:
    assert made.decode(made.encode(gradients(0, 4)), (0, 4)).shape == (0, 4)


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50), st.integers(1, 9)
)
def test_int8_is_within_half_a_scale_of_each_block(values: list[float], block: int) -> None:
    grads = np.array(values, np.float32)
    back = Int8(block).decode(Int8(block).encode(grads), grads.shape)
    for begin in range(0, len(grads), block):
        part = slice(begin, begin + block)
        greatest = np.abs(grads[part].astype(np.float64)).max()
        assert np.abs(back[part].astype(np.float64) - grads[part]).max() <= greatest / 253 + 1e-43


def test_top_k_sends_the_greatest_and_no_others() -> None:
    grads = np.array([[1, -9, 2], [0, 4, -3]], np.float32)
    assert TopK(0.5).decode(TopK(0.5).encode(grads), (2, 3)).tolist() == [[0, -9, 0], [0, 4, -3]]


def test_a_cast_is_the_nearest_value() -> None:
    assert Cast().decode(
        Cast().encode(np.array([1 + 2**-7 + 2**-9], np.float32)), (1,)
    ).tolist() == [1 + 2**-7]


def test_a_cast_of_what_is_too_large_is_the_greatest_there_is_and_the_rest_follows() -> None:
    feedback = Feedback(Cast("float16"))
    sent = [
        Cast("float16").decode(feedback.send(np.array(each, np.float32), taken)[0], (2,))
        for each in ([1e5, -1e9], [0, 0])
    ]
    assert sent[0].tolist() == [65504, -65504]
    assert sent[1].tolist() == [34496, -65504]
    assert np.isfinite(Cast().encode(np.array([np.finfo(np.float32).max], np.float32))[0]).all()


def test_a_gradient_that_could_not_be_sent_is_not_kept_and_what_was_left_before_is() -> None:
    top = TopK(0.5)
    feedback = Feedback(top)
    assert top.decode(feedback.send(np.array([4, 1], np.float32), taken)[0], (2,)).tolist() == [
        4,
        0,
    ]

    def full(*parts: np.ndarray) -> None:
        raise Backpressure("wait for some of them")

    with pytest.raises(Backpressure):
        feedback.send(np.array([8, 2], np.float32), full)
    assert top.decode(feedback.send(np.array([8, 2], np.float32), taken)[0], (2,)).tolist() == [
        8,
        0,
    ]
    assert top.decode(feedback.send(np.zeros(2, np.float32), taken)[0], (2,)).tolist() == [0, 3]


def test_what_was_left_goes_with_one_gradient_also_where_two_threads_send() -> None:
    top, sent, begun, go_on = TopK(0.5), list[np.ndarray](), threading.Event(), threading.Event()
    feedback = Feedback(top)
    feedback.send(np.array([4, 1], np.float32), taken)[0]  # 1 is left

    def rest(*parts: np.ndarray) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        sent.append(top.decode(parts, (2,)))

    threads = [
        threading.Thread(target=feedback.send, args=(np.array([0, 2], np.float32), rest))
        for _ in "ab"
    ]
    threads[0].start()
    assert begun.wait(PATIENCE_S)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sum(sent).tolist() == [0, 5]


@pytest.mark.parametrize("made", [Cast("float16"), Cast(), Int8(), TopK(0.5)], ids=str)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_is_refused_and_spoils_no_later_gradient(
    made: Compressor, bad: float
) -> None:
    feedback = Feedback(made)
    with pytest.raises(BadArguments, match="hold infinity or NaN; finite numbers are allowed"):
        feedback.send(np.array([1, bad, 2, 3], np.float32), taken)[0]
    assert np.isfinite(made.decode(feedback.send(np.ones(4, np.float32), taken)[0], (4,))).all()


@pytest.mark.parametrize("made", [Cast(), Int8(), TopK(0.05)], ids=str)
def test_with_feedback_nothing_is_lost_for_good(made: Compressor) -> None:
    feedback, random = Feedback(made), np.random.default_rng(6)
    pushed, arrived = np.zeros(40), np.zeros(40)
    for _ in range(200):
        grads = random.normal(size=40).astype(np.float32) + np.float32(0.3)
        pushed += grads
        arrived += made.decode(feedback.send(grads, taken)[0], (40,))
    # what is under way: some 20 gradients of an element with top_k
    np.testing.assert_allclose(arrived, pushed, atol=30)
    for _ in range(80):
        arrived += made.decode(feedback.send(np.zeros(40, np.float32), taken)[0], (40,))
    np.testing.assert_allclose(arrived, pushed, atol=1e-3)


def test_top_k_with_feedback_learns_what_without_it_never_moves() -> None:
    with_it, without = np.zeros(3, np.float32), np.zeros(3, np.float32)
    goal, top, feedback = np.array([10, 1, -1], np.float32), TopK(0.1), Feedback(TopK(0.1))
    for _ in range(300):
        with_it += np.float32(0.1) * top.decode(feedback.send(goal - with_it, taken)[0], (3,))
        without += np.float32(0.1) * top.decode(top.encode(np.array([10, 1, -1], np.float32)), (3,))
    np.testing.assert_allclose(with_it, goal, atol=0.6)
    assert without[1:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("made", "parts", "said"),
    [
        (
            Cast("float16"),
            (np.zeros(4, np.float32),),
            "'cast' are float32[4]; float16[2, 2] is allowed",
        ),
        (Int8(4), (np.zeros(4, np.int8),), "'int8' are int8[4]; int8[4], float32[1] is allowed"),
        (
            Int8(4),
            (np.zeros(4, np.int8), np.zeros(2, np.float32)),
            "int8[4], float32[2]; int8[4], float32[1] is allowed",
        ),
        (
            TopK(0.5),
            (np.array([0, 4], np.int32), np.zeros(2, np.float32)),
            "positions 0 to 4, of 4 elements",
        ),
        (TopK(0.5), (np.array([-1, 0], np.int32), np.zeros(2, np.float32)), "positions -1 to 0"),
        (TopK(0.5), (), "'top_k' are nothing; int32[2], float32[2] is allowed"),
    ],
)
def test_parts_that_cannot_have_been_encoded_are_refused(
    made: Compressor, parts: tuple[np.ndarray, ...], said: str
) -> None:
    with pytest.raises(BadArguments) as caught:
        made.decode(parts, (2, 2))
    assert said in str(caught.value)


@pytest.mark.parametrize("made", EVERY, ids=str)
def test_a_spec_goes_there_and_back(made: Compressor) -> None:
    assert compression.from_spec(made.to_spec()) == made


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "zip"}, "'zip' is not known; allowed: cast, int8, top_k"),
        ({"name": "cast", "dtype": "float32"}, "dtype is 'float32'; allowed: float16, bfloat16"),
        ({"name": "int8", "block": 0}, "block is 0; a whole number from 1"),
        ({"name": "top_k", "fraction": 1.5}, "fraction is 1.5; a number above 0 and at most 1"),
    ],
)
def test_a_bad_spec_is_refused_with_what_is_allowed(spec: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compression.from_spec(spec)
    assert said in str(caught.value)
