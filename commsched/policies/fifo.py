"""fifo: wait-free backpropagation. Chunks go in the order in which DDP makes buckets ready."""

from __future__ import annotations

from commsched import codecs
from commsched.layout import Layout, cut
from commsched.plan import Plan, Task
from commsched.settings import Settings

__all__ = ["fifo"]


def fifo(layout: Layout, settings: Settings) -> Plan:
    """One all-reduce a chunk, in bucket order.

    Source: wait-free backpropagation (Poseidon, ATC'17), with the tensor fusion of Horovod and the
    tensor partition of ByteScheduler (SOSP'19) at fixed sizes.
    """
    chunks = cut(layout, settings.chunk_bytes, settings.fusion_bytes)
    tasks = tuple(
        Task(index, "all_reduce", chunk, codecs.for_dtype(settings.codec, chunk))
        for index, chunk in enumerate(chunks)
    )
    return Plan("fifo", layout, tasks)
