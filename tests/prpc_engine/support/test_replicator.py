"""One channel's items to none, one or several others."""

from __future__ import annotations

import pytest

from prpc_engine.errors import Closed, ConfigError
from prpc_engine.support import Channel, ChannelReplicator, ThreadGroup
from tests.prpc_engine.processes import PATIENCE_S, wait_until


@pytest.mark.parametrize("outputs", [0, 1, 2, 5])
def test_every_output_gets_every_item_in_order_and_closes_with_the_source(outputs: int) -> None:
    source: Channel[int] = Channel(10)
    with ChannelReplicator(source, outputs, capacity=3) as replicator, ThreadGroup(5) as group:
        assert len(replicator.outputs) == outputs
        reads = [group.async_exec(list, output) for output in replicator.outputs]
        assert source.put_many(range(1000), PATIENCE_S) == 1000
        source.close()
        replicator.join(PATIENCE_S)
        assert [read.result(PATIENCE_S) for read in reads] == [list(range(1000))] * outputs


def test_the_slowest_reader_sets_the_pace() -> None:
    source: Channel[int] = Channel(1)
    with ChannelReplicator(source, 2, capacity=2) as replicator:
        fast, slow = replicator.outputs
        with ThreadGroup(2) as group:
            read = group.async_exec(list, fast)
            written = group.async_exec(source.put_many, range(100))
            wait_until(lambda: len(slow) == 2 and len(source) == 1, "bounds reached everywhere")
            assert not written.done()
            with pytest.raises(TimeoutError, match="output 1 of channel holds 2 of 2"):
                replicator.join(0)
            source.close()
            taken = list(range(written.result(PATIENCE_S)))
            assert list(slow) == taken
            assert read.result(PATIENCE_S) == taken


def test_a_reader_that_leaves_does_not_disturb_the_others() -> None:
    source: Channel[int] = Channel(10)
    with ChannelReplicator(source, 2, capacity=1) as replicator, ThreadGroup(2) as group:
        leaves, stays = replicator.outputs
        read = group.async_exec(list, stays)
        leaves.close()
        assert source.put_many(range(100), PATIENCE_S) == 100
        source.close()
        assert read.result(PATIENCE_S) == list(range(100))


def test_without_any_reader_left_the_producers_are_told() -> None:
    source: Channel[int] = Channel(4)
    with ChannelReplicator(source, 2) as replicator:
        for output in replicator.outputs:
            output.close()
        with pytest.raises(Closed):
            while True:
                source.put(1, PATIENCE_S)
        replicator.join(PATIENCE_S)


def test_closing_ends_it_and_tells_what_was_lost(caplog: pytest.LogCaptureFixture) -> None:
    source: Channel[int] = Channel(4)
    with ChannelReplicator(source, 1, capacity=1) as replicator:
        for number in range(2):  # one in the output, one on its way there
            source.put(number)
            wait_until(lambda: not len(source))
        source.put_many(range(2, 6))
        replicator.close()
    assert source.closed
    assert list(replicator.outputs[0]) == [0]
    assert "4 items were not replicated" in caplog.text
    assert "1 items did not reach it" in caplog.text


def test_an_impossible_number_of_outputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="outputs=-1"):
        ChannelReplicator(Channel(1), -1)
