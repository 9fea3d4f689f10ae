"""A connector whose instance is killed in the middle of a prompt."""

from __future__ import annotations

import os
import signal

from disagg_kv.engines.vllm.connector import DisaggKVConnector


class Deadly(DisaggKVConnector):
    """Transfers as ever, until the second chunk of the transfer ``deadly``."""

    def wait_for_save(self) -> None:
        """The step is computed."""
        super().wait_for_save()
        if any(one.transfer == "deadly" and one.stop > len(one.pages[0][1]) for one in self._work.chunks.values()):
            os.killpg(os.getpgid(0), signal.SIGKILL)
