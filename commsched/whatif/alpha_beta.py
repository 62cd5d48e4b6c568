"""What a collective takes among another number of ranks, or on another link. Pure functions.

A message of ``b`` bytes from one rank to another takes ``a + b * beta``: ``a`` seconds a *hop*. All
ranks send at the same time, each at its own link's full rate, which a switch allows. An all-reduce
of ``S`` bytes over ``n`` ranks then takes

    ring    2 (n - 1) a       +  2 (n - 1) / n * S * beta
    tree    2 ceil(log2 n) a  +  2 (n - 1) / n * S * beta / TREE_RATE      (n > 2)

Ring: Patarasuk and Yuan, 2009; n - 1 steps sum, n - 1 steps distribute, each of S / n bytes. Tree:
the logarithmic latency of Thakur, Rabenseifner and Gropp, 2005 (recursive halving and doubling) and
of two-tree broadcasts (Sanders, Speck and Traeff, 2009), with the same bytes on average, since each
of a tree's n - 1 edges carries S up and S down. Two ranks exchange the same messages either way.

The bytes are `Task.sent_bytes`, which knows the number of ranks; `Link.beta_s` is seconds for one
of them and therefore stays. `Link.alpha_s` is for a whole collective and changes with the ranks.

Left out: several ranks behind one link, links of different speed, congestion, summing itself; and
that half an all-reduce, which `rs_ag` sends, has half the hops: it is charged for all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from commsched.errors import CommSchedError
from commsched.profile import Link, Profile

__all__ = ["ALGORITHMS", "TREE_RATE", "at_ranks", "gbps_of", "hops", "link_of", "per_hop_s"]

ALGORITHMS = ("ring", "tree")
TREE_RATE = 0.92  # of the ring's bandwidth: the factor of NCCL's own cost model (tuning.cc)


def hops(ranks: int, algorithm: str = "ring") -> int:
    """Messages that follow one another in an all-reduce.

    Args:
        ranks: at least 1.
        algorithm: one of `ALGORITHMS`.
    """
    return 2 * (math.ceil(math.log2(ranks)) if algorithm == "tree" else ranks - 1)


def per_hop_s(link: Link, ranks: int) -> float:
    """A hop's latency in seconds, from a link measured among `ranks` with a ring, as gloo uses."""
    return link.alpha_s / max(1, hops(ranks))


def gbps_of(link: Link) -> float:
    """A link's rate in Gbit/s (1e9 bits of gradients a second); infinity where it is free."""
    return 8e-9 / link.beta_s if link.beta_s > 0 else math.inf


def link_of(gbps: float, hop_s: float, ranks: int, algorithm: str = "ring") -> Link:
    """The link of `ranks` ranks that are each connected at `gbps`.

    Args:
        gbps: 1e9 bits a second, in each direction.
        hop_s: a hop's latency in seconds.
        ranks: how many.
        algorithm: one of `ALGORITHMS`.
    """
    share = TREE_RATE if algorithm == "tree" and ranks > 2 else 1.0
    beta_s = 0.0 if math.isinf(gbps) else 8e-9 / (gbps * share)
    return Link(hops(ranks, algorithm) * hop_s, beta_s)


def at_ranks(
    profile: Profile,
    ranks: int | None = None,
    gbps: float | None = None,
    hop_s: float | None = None,
    algorithm: str = "ring",
) -> Profile:
    """The profile as it would be measured among other ranks, or on another link.

    Args:
        profile: measured. Its computing stays as it is: every rank keeps its own batch.
        ranks: how many; None: as measured.
        gbps: each rank's link; None: as measured.
        hop_s: a hop's latency in seconds; None: as measured.
        algorithm: one of `ALGORITHMS`. What is asked as measured, with a ring, is not changed.

    Raises:
        CommSchedError: one rank alone has measured no link, and none is given.
    """
    if profile.world_size < 2 and (gbps is None or hop_s is None):
        raise CommSchedError(
            "this profile is of one rank, which has no link: say which one with --gbps and "
            "--latency-us"
        )
    count = ranks or profile.world_size
    if (count, gbps, hop_s, algorithm) == (profile.world_size, None, None, "ring"):
        return profile
    rate = gbps_of(profile.link) if gbps is None else gbps
    latency_s = per_hop_s(profile.link, profile.world_size) if hop_s is None else hop_s
    return replace(profile, world_size=count, link=link_of(rate, latency_s, count, algorithm))
