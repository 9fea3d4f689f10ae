"""How many links an endpoint may hold: what one costs, and what the options and the process allow."""

from __future__ import annotations

import resource
from math import inf

from ...channels import UNKNOWN_LINK, Channel, SupportsLinkCost
from ...core import LinkBudget, Options
from ...transports import LinkCost

OWN_LINK = LinkCost(10_000, 1)
"""What the endpoint itself holds for a peer: its entry in several tables, and the watch of its process.
``benchmarks/scale.py`` measures it together with channel and transport."""

OWN_DESCRIPTORS = 256
"""File descriptors of a process for all else."""

REST = 2
"""Heartbeats for which a link stays after its last use: a peer with a room that uses this endpoint sends some."""

OVER = 5 / 4
"""Rooms may use this many times the links of the budget of descriptors; then a further peer is refused."""


def link_cost(channel: Channel, link: LinkCost) -> LinkCost:
    """What one connected peer costs; ``link``: of that its transport's connection."""
    of_channel = channel.link_cost if isinstance(channel, SupportsLinkCost) else UNKNOWN_LINK
    return OWN_LINK + of_channel + link


def allowed_descriptors(soft: int) -> float:
    """The budget of a process with this soft limit, so that ``OVER`` times as many still fit."""
    return inf if soft == resource.RLIM_INFINITY else max(0, soft - OWN_DESCRIPTORS) / OVER


def allowed_links(cost: LinkCost, options: Options, soft: int) -> LinkBudget:
    """The budget in links, at least one.

    Args:
        cost: of each.
        options: of the endpoint.
        soft: the process' soft limit on file descriptors.
    """
    by_descriptors = _times(options.link_descriptors or allowed_descriptors(soft), cost.descriptors)
    limit = max(by_descriptors + 1, _times(by_descriptors * OVER, 1))
    return LinkBudget(min(by_descriptors, _times(options.link_bytes, cost.nbytes)), limit, REST * options.heartbeat_s)


def _times(whole: float, part: int) -> float:
    """How often a part fits into the whole, at least once."""
    return inf if whole == inf or not part else max(1, int(whole / part))


def budget_of(channel: Channel, link: LinkCost, options: Options) -> LinkBudget:
    """The links of an endpoint of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return allowed_links(link_cost(channel, link), options, soft)
