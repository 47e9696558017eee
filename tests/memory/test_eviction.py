from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cairn.memory.radix import EvictionQueue, Node


class QueueMachine(RuleBasedStateMachine):
    """Against a dictionary that is searched for its minimum."""

    def __init__(self) -> None:
        super().__init__()
        self.priorities = dict.fromkeys(range(6), 0)
        self.nodes = [Node(bytes([item]), None, []) for item in range(6)]
        self.queue = EvictionQueue(lambda node: (self.priorities[node.key[0]],))
        self.model: dict[int, tuple[int, int]] = {}
        self.pushes = 0

    @rule(item=st.integers(0, 5), priority=st.integers(0, 3))
    def push(self, item: int, priority: int) -> None:
        self.priorities[item] = priority
        self.pushes += 1
        self.queue.push(self.nodes[item])
        self.model[item] = (priority, self.pushes)

    @rule(item=st.integers(0, 5))
    def discard(self, item: int) -> None:
        self.queue.discard(self.nodes[item])
        self.model.pop(item, None)

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        expected = min(self.model, key=lambda item: self.model[item])
        assert self.queue.pop() is self.nodes[expected]
        del self.model[expected]

    @invariant()
    def same_members(self) -> None:
        assert len(self.queue) == len(self.model)
        held = [item for item, node in enumerate(self.nodes) if node in self.queue]
        assert held == sorted(self.model)


TestQueueMachine = QueueMachine.TestCase


def test_dead_entries_do_not_pile_up() -> None:
    queue, node = EvictionQueue(lambda node: (0,)), Node(b"", None, [])
    for _ in range(1000):
        queue.push(node)
    assert len(queue) == 1
    assert len(queue._heap) < 100
