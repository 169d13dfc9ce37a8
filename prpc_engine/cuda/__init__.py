"""Tensors of CUDA devices in messages: what does not depend on the library that made them.

    file       has
    driver     the CUDA driver: devices, copies, memory that other processes open
    pool       such memory, and who may use a block of it again when
    opened     what of others' pools this process has open
    staging    a device's bytes in the host's memory
    placement  which device of the receiver a message's tensors are for
    transfers  a tensor's bytes into a message and out of it
    direct     whether an RDMA device may read and write such memory, and how
    direct_blocks  blocks of the pool in messages that do so

Nothing is loaded and no device is touched until the first tensor of one is sent or received, or a
device map names one. The tensors themselves: prpc_engine/archive/device_tensors.py; the maps:
prpc_engine/remote/device_maps.py.
"""
