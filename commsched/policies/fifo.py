"""fifo: wait-free backpropagation. Chunks go in the order in which DDP makes buckets ready."""

from __future__ import annotations

from commsched import codecs
from commsched.layout import cut
from commsched.plan import Plan, Task
from commsched.profile import Profile
from commsched.settings import MB, Settings

__all__ = ["fifo"]

CHUNK_BYTES = 4 * MB
CREDIT_BYTES = 16 * MB


def fifo(profile: Profile, settings: Settings) -> Plan:
    """One all-reduce a chunk, in bucket order. Needs no measurements.

    Source: wait-free backpropagation (Poseidon, ATC'17), with the tensor fusion of Horovod and the
    tensor partition of ByteScheduler (SOSP'19) at fixed sizes.
    """
    layout = profile.layout
    chunks = cut(layout, settings.chunk_bytes or CHUNK_BYTES, settings.fusion_bytes)
    tasks = tuple(
        Task(index, "all_reduce", chunk, codecs.for_dtype(settings.codec, chunk))
        for index, chunk in enumerate(chunks)
    )
    return Plan("fifo", layout, tasks, settings.credit_bytes or CREDIT_BYTES)
