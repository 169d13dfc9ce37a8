"""A way to give up a part that waits for another step: TensorFlow's sessions have none, but to
close the session. No I/O here.

Beside the op that waits, the part waits at a queue of its own. Whichever comes first ends both:

    the op has run            "prpc_gate_done" puts 0 into the queue: the part takes it, and has run
    somebody gives it up      "prpc_gate_give" puts 1 into it: "prpc_gate_check" fails, the step is
                              cancelled, and with it the op that waits, which then has taken nothing
    somebody has given it up  "prpc_gate_open" fails, before the op begins: what it would wait for
                              may be there already

A queue is of one run at a time: so many runs wait at once, so many copies of the part there are. A
run that failed may leave something in its queue: "prpc_gate_clear" takes it out before the next
one.
"""

from __future__ import annotations

from dataclasses import replace

from prpc_engine.tensorflow.rewrite import GraphPart

GIVE, CLEAR = "prpc_gate_give", "prpc_gate_clear"
_BOOL, _INT32 = 10, 3


def with_gate(part: GraphPart, name: str) -> GraphPart:
    """A copy of a part that may wait; `name` is of its queue, and no other's."""
    gated = replace(
        part,
        graph=type(part.graph)(),
        targets=[*part.targets, "prpc_gate_check", "prpc_gate_done"],
        waiting=[],
    )
    gated.graph.CopyFrom(part.graph)
    nodes = gated.graph.node
    queue = nodes.add(name="prpc_gate", op="FIFOQueueV2")
    queue.attr["component_types"].list.type.append(_INT32)
    queue.attr["shapes"].list.shape.add()
    queue.attr["capacity"].i = -1
    queue.attr["shared_name"].s = name.encode()
    for number, op in enumerate(("prpc_gate_done", GIVE)):
        constant = nodes.add(name=f"prpc_gate_{number}", op="Const")
        constant.attr["dtype"].type = _INT32
        constant.attr["value"].tensor.dtype = _INT32
        constant.attr["value"].tensor.tensor_shape.SetInParent()
        constant.attr["value"].tensor.int_val.append(number)
        put = nodes.add(name=op, op="QueueEnqueueV2", input=["prpc_gate", constant.name])
        put.attr["Tcomponents"].list.type.append(_INT32)
    next(one for one in nodes if one.name == "prpc_gate_done").input.extend(
        f"^{one}" for one in part.waiting
    )
    take = nodes.add(name="prpc_gate_take", op="QueueDequeueV2", input=["prpc_gate"])
    take.attr["component_types"].list.type.append(_INT32)
    size = nodes.add(name="prpc_gate_size", op="QueueSizeV2", input=["prpc_gate"])
    clear = nodes.add(name=CLEAR, op="QueueDequeueManyV2", input=["prpc_gate", size.name])
    clear.attr["component_types"].list.type.append(_INT32)
    for op, value in (("prpc_gate_check", take.name), ("prpc_gate_open", size.name)):
        equal = nodes.add(name=f"{op}_equal", op="Equal", input=[value, "prpc_gate_0"])
        equal.attr["T"].type = _INT32
        check = nodes.add(name=op, op="Assert", input=[equal.name, value])
        check.attr["T"].list.type.append(_INT32)
    for node in nodes:
        if node.name in part.waiting:
            node.input.append("^prpc_gate_open")
    return gated
