"""Tensors of torch, TensorFlow and JAX arrive as such where that library is imported, and as numpy
arrays elsewhere.

What a process without the library receives is looked at in this one with the library hidden.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest

from prpc_engine.archive import Archive, ArchiveError, Decoder, encode, pickles
from prpc_engine.archive.tensors import ALIGNMENT_BYTES
from prpc_engine.errors import BadArguments
from tests.prpc_engine.archives import arrive, same, there_and_back

TRUSTING = Archive(allow_pickle=True)
BODY_BYTES_MAX = 2000  # of an object whose memory is elsewhere

TORCH_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
TORCH_DTYPES += ["bfloat16", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"]


@dataclasses.dataclass
class Holder:
    """An object with something in it."""

    held: Any


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_one_element_of_any_stride_comes_back(torch: Any) -> None:
    wide = torch.arange(24, dtype=torch.float32).reshape(1, 4, 6)
    for one in (wide[:, 1, 2], wide[:, -1:, 0], wide[0, ::4, ::6], wide[:, 3, 5].bfloat16()[::2]):
        assert one.numel() == 1
        back = there_and_back(one)
        assert (back.shape, back.dtype, back.item()) == (one.shape, one.dtype, one.item())


def test_a_nested_tensor_is_refused_with_advice(torch: Any) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(BadArguments, match=r"nested torch tensor: send value.unbind\(\)"):
        encode(nested)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_tensors_of_every_dtype_come_back(torch: Any, name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    for shape in ((), (0,), (7,), (3, 0, 2), (2, 3, 4)):
        tensor = torch.ones(shape).to(dtype)
        back = there_and_back(tensor)
        assert (type(back), back.dtype, back.shape) == (torch.Tensor, dtype, tensor.shape)
        assert bytes(back.reshape(-1).view(torch.uint8).tolist() if back.numel() else []) == bytes(
            tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []
        )


def test_the_memory_of_a_torch_tensor_is_the_block_itself_and_what_arrives_is_the_receivers(
    torch: Any,
) -> None:
    tensor = torch.arange(1000)
    body, (block,) = encode([tensor])
    assert block.ctypes.data == tensor.data_ptr()
    block.flags.writeable = False
    (back,) = Decoder().decode(body, [block])
    back += 1
    assert torch.equal(tensor, torch.arange(1000))
    assert torch.equal(back, tensor + 1)


def test_views_gradients_conjugates_and_parameters_arrive_as_plain_tensors(torch: Any) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (
        base.transpose(0, 2),
        base[:, ::2],
        base.expand(5, 2, 3, 4),
        base.clone().requires_grad_(),
        torch.nn.Parameter(base),
        torch.view_as_complex(base.reshape(-1, 2)).conj(),
        torch.view_as_complex(base.reshape(-1, 2)).conj().imag,
    ):
        back = there_and_back(tensor)
        assert type(back) is torch.Tensor
        assert not back.requires_grad
        assert torch.equal(back, tensor.detach())


def test_torch_tensors_that_are_not_in_plain_memory_are_refused_with_what_to_do(torch: Any) -> None:
    with pytest.raises(
        BadArguments,
        match=r"the value\[0\] cannot be sent: it is a torch tensor on meta: send value.cpu",
    ):
        encode([torch.empty(3, device="meta")])
    with pytest.raises(BadArguments, match=r"layout torch.sparse_coo: send value.to_dense"):
        encode(torch.eye(3).to_sparse())
    with pytest.raises(BadArguments, match=r"on meta: send value.cpu"):
        TRUSTING.encode([torch.empty(3, device="meta")])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_and_quantized_torch_tensors_are_pickled_where_that_is_allowed(torch: Any) -> None:
    for tensor in (torch.eye(50).to_sparse(), torch.eye(50).to_sparse_csr()):
        back = arrive(*TRUSTING.encode([tensor]), TRUSTING)[0]
        assert (back.layout, back.shape) == (tensor.layout, tensor.shape)
        assert torch.equal(back.to_dense(), tensor.to_dense())
    quantized = torch.quantize_per_tensor(torch.arange(100.0), 0.5, 3, torch.qint8)
    back = arrive(*TRUSTING.encode(quantized), TRUSTING)
    assert (back.dtype, back.q_scale()) == (torch.qint8, 0.5)
    assert torch.equal(back.int_repr(), quantized.int_repr())


def test_a_process_without_torch_gets_a_numpy_array(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [torch.arange(6).reshape(2, 3), torch.ones(3, dtype=torch.bool)]
    body, blocks = encode(sent)
    monkeypatch.delitem(sys.modules, "torch")
    back = Decoder().decode(body, blocks)
    assert same(back, [np.arange(6).reshape(2, 3), np.ones(3, bool)])
    assert "torch" not in sys.modules, "it is never imported for a peer"


def test_a_tensor_that_does_not_fit_its_block_is_refused(torch: Any) -> None:
    body, (block,) = encode(torch.arange(6))
    for wrong in (block[:-8], np.zeros(56, np.uint8), block[:0]):
        with pytest.raises(ArchiveError):
            Decoder().decode(body, [wrong])
    body, _ = encode(torch.ones(4, dtype=torch.bool))
    with pytest.raises(ArchiveError, match="neither 0 nor 1"):
        Decoder().decode(body, [np.full(4, 9, np.uint8)])


# -- torch inside of pickles -----------------------------------------------------------------------


def through_a_pickle(held: Any) -> Any:
    return arrive(*TRUSTING.encode(Holder(held)), TRUSTING).held


def test_the_parameters_of_a_module_are_blocks_and_it_goes_on_learning(torch: Any) -> None:
    module = torch.nn.Linear(300, 200)
    body, blocks = TRUSTING.encode(module)
    assert len(body) < BODY_BYTES_MAX
    (block,) = blocks
    assert block.ctypes.data == module.weight.data_ptr()
    assert block.nbytes == 300 * 200 * 4
    back = arrive(body, blocks, TRUSTING)
    assert type(back.weight) is torch.nn.Parameter
    inputs = torch.ones(1, 300)
    assert torch.equal(back(inputs), module(inputs))
    before = module.weight.detach().clone()
    back(inputs).sum().backward()
    torch.optim.SGD(back.parameters(), lr=1.0).step()
    assert torch.equal(module.weight, before), "what arrives is the receiver's"
    assert torch.equal(back.weight, before - 1)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_tensors_of_every_dtype_in_an_object_are_blocks(torch: Any, name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    for shape in ((), (0,), (7,), (2, 3, 4), (100, 400)):
        tensor = torch.ones(shape).to(dtype)
        body, blocks = TRUSTING.encode(Holder([tensor, 1]))
        size_bytes = tensor.numel() * tensor.element_size()
        assert sum(block.nbytes for block in blocks) == (size_bytes if len(shape) == 2 else 0)
        assert len(body) < BODY_BYTES_MAX
        back, _ = arrive(body, blocks, TRUSTING).held
        assert (type(back), back.dtype, back.shape) == (torch.Tensor, dtype, tensor.shape)
        assert back.data_ptr() % ALIGNMENT_BYTES == 0 or not size_bytes
        assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("count", [100, 100_000], ids=["in the body", "in a block"])
def test_tensors_of_one_storage_share_one_afterwards(torch: Any, count: int) -> None:
    whole = torch.arange(count * 1.0)
    held = [whole, whole[10:20], whole[::2], whole.view(10, -1).T, whole.view(torch.int32), whole]
    body, blocks = TRUSTING.encode(Holder(held))
    assert sum(block.nbytes for block in blocks) == (4 * count if count > 100 else 0)
    back = arrive(body, blocks, TRUSTING).held
    for one, two in zip(back, held, strict=True):
        assert torch.equal(one, two)
        assert (one.stride(), one.storage_offset()) == (two.stride(), two.storage_offset())
    base = back[0]
    base[10] = -1
    for one, two in zip(
        back,
        (base, base[10:20], base[::2], base.view(10, -1).T, base.view(torch.int32)),
        strict=False,
    ):
        assert torch.equal(one, two)
    assert back[0] is back[5]
    assert whole[10] == 10


def test_tied_weights_stay_tied(torch: Any) -> None:
    encoder, decoder = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)
    decoder.weight = encoder.weight
    both = torch.nn.Sequential(encoder, decoder)
    body, blocks = TRUSTING.encode(both)
    assert sum(block.nbytes for block in blocks) == 100 * 100 * 4
    back = arrive(body, blocks, TRUSTING)
    assert back[0].weight is back[1].weight
    assert len(list(back.parameters())) == 3


def test_what_torch_says_of_a_tensor_is_kept_in_an_object(torch: Any) -> None:
    learning = torch.ones(5000, requires_grad=True)
    fixed = torch.nn.Parameter(torch.ones(5000), requires_grad=False)
    named = torch.ones(5000)
    named.unit = "m"
    turned = torch.view_as_complex(torch.arange(10_000.0).reshape(-1, 2)).conj()
    back = through_a_pickle([learning, fixed, named, turned, turned.imag])
    assert [each.requires_grad for each in back] == [True, False, False, False, False]
    assert [type(each) for each in back[:2]] == [torch.Tensor, torch.nn.Parameter]
    assert back[2].unit == "m"
    assert back[3].is_conj()
    assert back[4].is_neg()
    assert torch.equal(back[3], turned)
    assert torch.equal(back[4], turned.imag)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch means to give quantized tensors up
def test_tensors_that_are_not_strided_ones_on_the_cpu_have_torchs_own_way(torch: Any) -> None:
    sparse = torch.eye(5000).to_sparse()
    body, blocks = TRUSTING.encode(Holder(sparse))
    assert len(body) < BODY_BYTES_MAX, "what it is made of are tensors, too"
    assert sum(block.nbytes for block in blocks) == 5000 * (2 * 8 + 4)
    back = arrive(body, blocks, TRUSTING).held
    assert back.layout == torch.sparse_coo
    assert torch.equal(back.coalesce().values(), sparse.coalesce().values())
    rows = torch.eye(100).to_sparse_csr()
    assert torch.equal(through_a_pickle(rows).to_dense(), rows.to_dense())
    meta = through_a_pickle(torch.nn.Linear(3, 4, device="meta"))
    assert (meta.weight.device.type, meta.weight.shape) == ("meta", (4, 3))
    quantized = torch.quantize_per_tensor(torch.arange(1000.0), 0.5, 3, torch.qint8)
    back = through_a_pickle(quantized)
    assert (back.dtype, back.q_scale(), back.q_zero_point()) == (torch.qint8, 0.5, 3)
    assert torch.equal(back.int_repr(), quantized.int_repr())


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch means to give typed storages up
def test_storages_in_an_object_arrive_as_torch_load_gives_them(torch: Any) -> None:
    tensor = torch.arange(10_000.0)
    typed, single = through_a_pickle([tensor.storage(), tensor.untyped_storage()])
    assert (typed.dtype, typed.tolist()) == (torch.float32, tensor.tolist())
    assert single.dtype is torch.uint8
    typed[5] = -1.0
    assert torch.empty(0).set_(single.untyped()).view(torch.float32)[5] == -1


def test_tensors_beyond_the_blocks_that_a_message_may_have_are_copied_into_the_pickle(
    torch: Any,
) -> None:
    held = [torch.full((5000,), float(number)) for number in range(5)]
    stream, buffers = pickles.dump(Holder(held), 2)
    assert len(buffers) == 2
    back = pickles.load(stream, [buffer.copy() for buffer in buffers]).held
    assert all(torch.equal(*pair) for pair in zip(back, held, strict=True))
    back[4] += 1
    assert back[4][0] == 5


def test_a_storage_that_is_not_as_long_as_its_pickle_says_is_refused(torch: Any) -> None:
    body, (block,) = TRUSTING.encode(Holder(torch.arange(10_000)))
    for wrong in (block[:-8], np.zeros(block.nbytes + 8, np.uint8), block[:0]):
        with pytest.raises(ArchiveError, match="a torch storage of 80000 bytes in a buffer of"):
            TRUSTING.decode(body, [wrong])
    with pytest.raises(ArchiveError, match="block 0 of 0"):
        TRUSTING.decode(body, [])


# -- JAX -------------------------------------------------------------------------------------------


def test_jax_arrays_in_an_object_are_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    jax = pytest.importorskip("jax")
    for dtype in ("float32", "bfloat16", "bool", "int8"):
        array = jax.numpy.ones((200, 300), dtype)
        body, blocks = TRUSTING.encode(Holder(array))
        assert len(body) < BODY_BYTES_MAX
        assert [block.nbytes for block in blocks] == [array.nbytes]
        back = arrive(body, blocks, TRUSTING).held
        assert isinstance(back, jax.Array)
        assert (back.dtype, back.shape, back.weak_type) == (array.dtype, array.shape, False)
        assert bool((back == array).all())
    weak = jax.numpy.asarray(1.5)
    assert through_a_pickle(weak).weak_type == weak.weak_type
    key = jax.random.key(5)
    assert bool(
        (through_a_pickle([weak, jax.random.key_data(key)])[1] == jax.random.key_data(key)).all()
    )
    with jax.enable_x64(True):
        body, blocks = TRUSTING.encode(Holder(jax.numpy.arange(3, dtype="int64")))
    back = arrive(body, blocks, TRUSTING).held
    assert same(back, np.arange(3)), "JAX would have made 32 bits of it"


def test_jax_arrays_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    jax = pytest.importorskip("jax")
    for array in (
        jax.numpy.arange(6.0).reshape(2, 3),
        jax.numpy.ones((2, 2), jax.numpy.bfloat16),
        jax.numpy.zeros((0, 3)),
        jax.numpy.int32(5),
    ):
        back = there_and_back(array)
        assert isinstance(back, jax.Array)
        assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())
    with jax.enable_x64(True):
        body, blocks = encode(jax.numpy.arange(3, dtype="int64"))
    back = Decoder().decode(body, blocks)
    assert same(back, np.arange(3)), "JAX would have made 32 bits of it"
    with pytest.raises(BadArguments, match="cannot be sent"):
        jax.jit(encode)(jax.numpy.arange(3))
    with pytest.raises(BadArguments, match="cannot be sent"):
        encode(jax.random.key(0))


@pytest.fixture(scope="module")
def tensorflow() -> Any:
    """TensorFlow, with what it keeps for ever opened before the leak fixture looks."""
    module = pytest.importorskip("tensorflow")
    module.constant(0)
    return module


def test_tensorflow_tensors_come_back(tensorflow: Any) -> None:
    for array in (np.arange(6.0).reshape(2, 3), np.zeros((0, 3), np.int32), np.array(True)):
        back = there_and_back(tensorflow.constant(array))
        assert isinstance(back, tensorflow.Tensor)
        assert same(np.asarray(back), array)
    with pytest.raises(BadArguments, match="no plain bytes"):
        encode(tensorflow.constant(["text"]))


def test_tensorflow_tensors_in_an_object_are_blocks(tensorflow: Any) -> None:
    for held in (
        tensorflow.reshape(tensorflow.range(60_000), (200, 300)),
        tensorflow.ones((200, 300), tensorflow.bfloat16),
    ):
        body, blocks = TRUSTING.encode(Holder(held))
        assert len(body) < BODY_BYTES_MAX
        assert [block.nbytes for block in blocks] == [held.dtype.size * 60_000]
        back = arrive(body, blocks, TRUSTING).held
        assert isinstance(back, tensorflow.Tensor)
        assert (back.dtype, back.shape) == (held.dtype, held.shape)
        assert bool(tensorflow.reduce_all(back == held))
