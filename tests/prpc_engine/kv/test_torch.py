"""Models of torch on tables, against the same models trained by torch's own optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from prpc_engine import Master, RpcService  # noqa: E402 - the line above skips all of this where torch is not
from prpc_engine.demo.baseline import train_baseline  # noqa: E402
from prpc_engine.demo.data import load_flights  # noqa: E402
from prpc_engine.demo.settings import DemoSettings  # noqa: E402
from prpc_engine.demo.torch import evaluate, train  # noqa: E402
from prpc_engine.errors import BadArguments, ConfigError  # noqa: E402
from prpc_engine.kv import TableServer, TableWorker  # noqa: E402
from prpc_engine.kv import torch as kv_torch  # noqa: E402
from prpc_engine.kv.client.local import LocalService  # noqa: E402

SGD = {"name": "sgd", "learning_rate": 0.1}
UNIFORM = {"name": "uniform", "scale": 0.5, "seed": 3}
AUC_TOLERANCE = 0.005


@pytest.fixture
def kv() -> Iterator[TableWorker]:
    """Two shards and a worker, over the wire."""
    with (
        Master() as master,
        RpcService(master=master.address, shards=2) as servers,
        RpcService(master=master.address) as service,
    ):
        TableServer(servers)
        yield TableWorker(service, expected_servers=2)


def local_kv() -> TableWorker:
    service = LocalService()
    TableServer(service)
    return TableWorker(service)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def test_a_step_is_that_of_torchs_own_optimizer(kv: TableWorker) -> None:
    ours, theirs = net(), net()
    ours[0].bias.requires_grad_(False)
    theirs[0].bias.requires_grad_(False)
    optimizer = kv_torch.Optimizer(
        ours, kv, "net", {"name": "adam", "learning_rate": 0.01}, split_bytes_min=0
    )
    reference = torch.optim.Adam(
        [each for each in theirs.parameters() if each.requires_grad], lr=0.01
    )
    for step in range(5):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        for model, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            model(x).square().mean().backward()
            each.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_parameters_and_gradients_are_views_of_what_is_sent() -> None:
    model = net()
    optimizer = kv_torch.Optimizer(model, local_kv(), "net", SGD)
    model(torch.ones(2, 5)).sum().backward()
    assert optimizer.parameters is not None
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == optimizer.parameters.values[name].ctypes.data
        assert parameter.grad.data_ptr() == optimizer.parameters.grads[name].ctypes.data


def test_gradients_that_a_user_replaced_and_other_dtypes_are_sent_as_well() -> None:
    model = net().double()
    before = model[2].bias.detach().clone()
    optimizer = kv_torch.Optimizer(model, local_kv(), "net", SGD)
    model.zero_grad(set_to_none=True)
    model[2].bias.grad = torch.ones(1, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(model[2].bias.detach(), before - 0.1, rtol=1e-6, atol=1e-6)
    assert model[2].bias.dtype == torch.float64


def test_two_workers_train_one_model_however_they_start() -> None:
    service = LocalService()
    TableServer(service)
    one, other = net(), net()
    optimizers = [
        kv_torch.Optimizer(each, TableWorker(service), "net", SGD) for each in (one, other)
    ]
    one(torch.ones(2, 5)).sum().backward()
    optimizers[0].step()
    optimizers[1].pull()
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    late = net(seed=1)  # its values are those of the others
    kv_torch.Optimizer(late, TableWorker(service), "net", SGD)
    for mine, theirs in zip(one.parameters(), late.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ConfigError, match="other names, shapes"):
        kv_torch.Optimizer(torch.nn.Linear(1, 1), TableWorker(service), "net", SGD)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_an_embedding_bag_learns_as_torchs_own_sparse_one(kv: TableWorker, mode: str) -> None:
    bag = kv_torch.EmbeddingBag(kv, f"words {mode}", 4, SGD, UNIFORM, mode=mode)
    start = kv.pull(f"words {mode}", np.arange(10))
    theirs = torch.nn.EmbeddingBag.from_pretrained(
        torch.from_numpy(start.copy()), freeze=False, mode=mode, sparse=True
    )
    optimizer = kv_torch.Optimizer(bag, kv, "none", SGD)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for keys in (torch.tensor([[1, 2, 2], [9, 1, 0]]), torch.tensor([[2, 3, 4]])):
        for model, each in ((bag, optimizer), (theirs, reference)):
            each.zero_grad()
            (model(keys) + model(keys + 1 - 1)).square().sum().backward()
            each.step()
    np.testing.assert_allclose(
        kv.pull(f"words {mode}", np.arange(10)),
        theirs.weight.detach().numpy(),
        rtol=1e-5,
        atol=1e-6,
    )


def test_who_only_reads_an_embedding_pushes_nothing() -> None:
    kv = local_kv()
    rows = kv_torch.Embedding(kv, "words", 3, SGD, UNIFORM)
    with torch.no_grad():
        assert rows(torch.tensor([[7, -8], [7, 2**62]])).shape == (2, 2, 3)
    rows.eval()
    assert not rows(torch.tensor(5)).requires_grad
    rows.submit_push().result()
    assert kv.statistics().popitem()[1]["words"].pushes == 0


def test_what_an_embedding_cannot_use_is_refused_by_name() -> None:
    kv = local_kv()
    bag = kv_torch.EmbeddingBag(kv, "words", 3, SGD)
    with pytest.raises(BadArguments, match=r"keys are torch\.int32"):
        bag(torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(BadArguments, match="keys are a list"):
        bag([[1, 2]])
    for shape in ((1,), (2, 0)):
        with pytest.raises(BadArguments, match=r"\[n, fields\] is allowed"):
            bag(torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(BadArguments, match="allowed: sum, mean"):
        kv_torch.EmbeddingBag(kv, "words", 3, SGD, mode="max")
    with pytest.raises(BadArguments, match=r"forwards without step\(\) or zero_grad\(\)"):
        for _ in range(kv_torch.FORWARDS_MAX + 1):
            bag(torch.zeros(1, 1, dtype=torch.int64))


def test_the_demos_model_in_torch_learns_what_the_baseline_does(kv: TableWorker) -> None:
    flights, settings = load_flights(), DemoSettings(epochs=2)
    assert evaluate(train(kv, flights, settings), flights) == pytest.approx(
        train_baseline(flights, settings).auc, abs=AUC_TOLERANCE
    )


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    load_file = pytest.importorskip("safetensors.torch").load_file
    return {
        name: tensor
        for path in folder.rglob("*-table-*.safetensors")
        for name, tensor in load_file(path).items()
    }


def test_a_checkpoint_opens_as_the_models_state_dict_and_restores_it_elsewhere(
    tmp_path: Path,
) -> None:
    kv, model = local_kv(), net()
    optimizer = kv_torch.Optimizer(model, kv, "net", SGD)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    kv.save(str(tmp_path), step=1)
    plain = net(seed=7)
    plain.load_state_dict(files_of(tmp_path))
    other, kv = net(seed=8), local_kv()
    kv.restore(str(tmp_path))
    kv_torch.Optimizer(other, kv, "net", SGD)
    for name, value in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value)
        assert torch.equal(other.state_dict()[name], value)


@pytest.mark.parametrize("is_assigned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "optimizer", [SGD, {"name": "ftrl", "learning_rate": 0.1}], ids=["sgd", "ftrl"]
)
def test_a_state_dict_that_is_loaded_stays(
    optimizer: dict[str, object], dtype: torch.dtype, is_assigned: bool
) -> None:
    service = LocalService()
    TableServer(service)
    model, other, loaded = net().to(dtype), net(), net(seed=5).to(dtype).state_dict()
    mine, theirs = (
        kv_torch.Optimizer(each, TableWorker(service), "net", optimizer) for each in (model, other)
    )
    model.load_state_dict(
        {name: value.clone() for name, value in loaded.items()}, assign=is_assigned
    )
    for each in (mine, theirs):
        each.zero_grad()
        each.step()
    for name, value in loaded.items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other.state_dict()[name].to(dtype), value, rtol=1e-5, atol=1e-6)
    model(torch.ones(2, 5, dtype=dtype)).sum().backward()
    mine.step()
    theirs.pull()
    assert not torch.equal(model[2].bias.detach(), loaded["2.bias"])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.float(), two)


def test_a_parameter_that_is_changed_in_place_is_kept_by_the_next_step() -> None:
    model = net()
    optimizer = kv_torch.Optimizer(model, local_kv(), "net", SGD)
    with torch.no_grad():
        model[2].bias.fill_(5.0)
    optimizer.step()
    assert model[2].bias.item() == 5.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_whose_data_is_replaced_is_trained_from_there(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(4, 1, bias=False).to(dtype)
    optimizer = kv_torch.Optimizer(model, local_kv(), "net", SGD)
    torch.nn.utils.vector_to_parameters(torch.zeros(4, dtype=dtype), model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 4, dtype=dtype)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 4), -0.3, dtype=dtype))


def test_parameters_that_are_no_floating_numbers_are_refused_by_name() -> None:
    model = torch.nn.ParameterDict({"p": torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    with pytest.raises(BadArguments, match=r"'p' is of torch\.complex64; floating numbers"):
        kv_torch.Optimizer(model, local_kv(), "net", SGD)
