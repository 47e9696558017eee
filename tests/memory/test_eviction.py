from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cairn.memory.eviction import EvictionQueue


class QueueMachine(RuleBasedStateMachine):
    """Against a dictionary that is searched for its minimum."""

    def __init__(self) -> None:
        super().__init__()
        self.priorities = dict.fromkeys(range(6), 0)
        self.queue = EvictionQueue[int](lambda item: (self.priorities[item],))
        self.model: dict[int, tuple[int, int]] = {}
        self.pushes = 0

    @rule(item=st.integers(0, 5), priority=st.integers(0, 3))
    def push(self, item: int, priority: int) -> None:
        self.priorities[item] = priority
        self.pushes += 1
        self.queue.push(item)
        self.model[item] = (priority, self.pushes)

    @rule(item=st.integers(0, 5))
    def discard(self, item: int) -> None:
        self.queue.discard(item)
        self.model.pop(item, None)

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        expected = min(self.model, key=lambda item: self.model[item])
        assert self.queue.pop() == expected
        del self.model[expected]

    @invariant()
    def same_members(self) -> None:
        assert len(self.queue) == len(self.model)
        assert all((item in self.queue) == (item in self.model) for item in range(6))


TestQueueMachine = QueueMachine.TestCase


def test_dead_entries_do_not_pile_up() -> None:
    queue = EvictionQueue[str](lambda item: (0,))
    for _ in range(1000):
        queue.push("a")
    assert len(queue) == 1
    assert len(queue._heap) < 100
