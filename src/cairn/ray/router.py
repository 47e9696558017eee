"""Prefix routing inside Ray Serve: the only module that uses Ray's router interface.

Ray's own prefix router works in its LLM package only. The base class used here is part of
`ray.serve`'s public interface.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cairn.ray.affinity import Affinity
from cairn.ray.call import Call


class PrefixRouter(RequestRouter):
    """Sends a prompt to the replica that has its prefix, unless that one is too busy."""

    def initialize_state(self, **options: Any) -> None:
        self._affinity = Affinity(options["imbalance"])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas: Ray takes the first rank with room."""
        if pending_request is None:
            return [candidate_replicas]
        call: Call = pending_request.args[0]
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        queues = self.replica_queue_len_cache
        loads = {name: queues.get(replica.replica_id) or 0 for name, replica in named.items()}
        chosen = self._affinity.choose(call.blocks, loads)
        return [[named.pop(chosen)], list(named.values())]
