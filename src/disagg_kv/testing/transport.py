"""The conformance suite for transports: subclass it, name a factory, run pytest.

::

    class TestMine(TransportSuite):
        @classmethod
        def factory(cls):
            return MyTransport
"""

from __future__ import annotations

from .ends import HostMemory, Memory
from .transport_after import AfterwardsCases
from .transport_claims import ClaimCases, LossCases
from .transport_data import DataCases
from .transport_events import EventCases
from .transport_flags import FlagCases
from .transport_fork import ForkCases
from .transport_leaks import LeakCases
from .transport_mapping import MappingCases
from .transport_peers import MemoryCases, PeerCases
from .transport_process import ProcessCases
from .transport_threads import ThreadCases

__all__ = ["HostMemory", "Memory", "TransportSuite"]


class TransportSuite(
    DataCases,
    EventCases,
    MappingCases,
    FlagCases,
    MemoryCases,
    PeerCases,
    AfterwardsCases,
    ClaimCases,
    LossCases,
    ProcessCases,
    ThreadCases,
    ForkCases,
    LeakCases,
):
    """Everything a transport promises. Tests that need a capability skip without it.

    Override :meth:`factory`; for other memory than the CPU's, :meth:`memory`; and, if needed, ``one_process`` and
    ``timeout_s``. Each test of data runs with both ends in this process and with the target in another one; what is
    asked of a peer that dies or freezes is asked of a real process.
    """
