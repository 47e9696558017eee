"""Records which pages are on the device, in host memory, or in both. No tensors.

With a host tier, page ids name pages of host memory. The pages of a second group, called frames,
are places on the device. A page may be in a frame:

    FREE -> FILLING    one request writes it, in a frame
         -> BACKING    complete, and being copied to the host; its frame cannot be reused yet
         -> CLEAN      in host memory and in a frame, which can be released at any time
        <-> HOST_ONLY  only in host memory; read slice by slice, or fetched into a frame
         -> FREE

Changes that concern a step are part of its plan and take effect when the step begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from cairn.memory.pages import NULL_PAGE


class PageState(Enum):
    FREE = "free"
    FILLING = "filling"
    BACKING = "backing"
    CLEAN = "clean"
    HOST_ONLY = "host_only"


class Transfer(NamedTuple):
    page: int
    frame: int


class CopyEdits(NamedTuple):
    """Changes at the beginning of a step: first `frames`, then `fetches`."""

    frames: tuple[Transfer, ...] = ()
    """Pages with their new frames; NULL_PAGE if a page no longer has one."""
    fetches: tuple[Transfer, ...] = ()
    """Pages to copy from the host into their frames."""


class Mover(Protocol):
    """Copies complete pages to the host in the background."""

    def back_up(self, transfers: Sequence[Transfer]) -> None:
        """Start copies from frames to host pages, after every step launched so far."""
        ...

    def poll(self) -> list[Transfer]:
        """Copies completed since the last call, in any order."""
        ...

    def wait(self) -> list[Transfer]:
        """Like `poll`, but waits for a copy if none is complete and some are in progress."""
        ...


class PageCopies:
    def __init__(self, num_pages: int, num_frames: int, mover: Mover) -> None:
        self._frame_of = [NULL_PAGE] * (num_pages + 1)
        self._page_of = [NULL_PAGE] * (num_frames + 1)
        self._durable = bytearray(num_pages + 1)
        self._backing: dict[int, int] = {}  # page -> frame, until the copy is known to be done
        self._to_start: list[Transfer] = []
        self._edits: dict[int, int] = {}  # page -> frame, since the last plan
        self._fetches: dict[int, int] = {}  # frame -> page, since the last plan
        self._mover = mover
        self._num_durable = 0
        self._num_clean = 0  # durable, and in a frame
        self.fetched_pages = 0

    # -- what is where ------------------------------------------------------------------------

    def is_durable(self, page: int) -> bool:
        """The page is in host memory."""
        return bool(self._durable[page])

    def state(self, page: int, refcount: int) -> PageState:
        if refcount == 0:
            return PageState.FREE
        if page in self._backing:
            return PageState.BACKING
        if not self._durable[page]:
            return PageState.FILLING
        return PageState.CLEAN if self._frame_of[page] else PageState.HOST_ONLY

    def count(self, free_pages: int) -> dict[PageState, int]:
        """Number of pages by state; the states add up to all pages."""
        backing = len(self._backing)
        used = len(self._frame_of) - 1 - free_pages
        return {
            PageState.FREE: free_pages,
            PageState.FILLING: used - backing - self._num_durable,
            PageState.BACKING: backing,
            PageState.CLEAN: self._num_clean,
            PageState.HOST_ONLY: self._num_durable - self._num_clean,
        }

    def backing(self) -> list[Transfer]:
        return [Transfer(page, frame) for page, frame in self._backing.items()]

    # -- the life of a page -------------------------------------------------------------------

    def fill(self, page: int, frame: int) -> None:
        """Record a new page that will be written in `frame`."""
        self._place(page, frame)

    def fetch(self, page: int, frame: int) -> None:
        """Copy a page that is only in host memory into a frame when the next step begins."""
        assert self._durable[page] and self._frame_of[page] == NULL_PAGE
        self._place(page, frame)
        self._fetches[frame] = page
        self._num_clean += 1
        self.fetched_pages += 1

    def complete(self, page: int, frame: int) -> None:
        """Queue a page for its copy to the host. The steps launched so far write all its rows.

        The caller must hold page and frame until `poll` or `wait` returns them.
        """
        assert not self._durable[page] and page not in self._backing
        self._backing[page] = frame
        self._to_start.append(Transfer(page, frame))

    def start(self) -> None:
        """Start the queued copies; the steps that complete these pages have been launched."""
        if self._to_start:
            self._mover.back_up(self._to_start)
            self._to_start = []

    def poll(self) -> list[Transfer]:
        return self._settle(self._mover.poll()) if self._backing else []

    def wait(self) -> list[Transfer]:
        """At least one completed copy; empty if none is in progress or a copy failed."""
        if not self._backing:
            return []
        self.start()  # an earlier start may have failed
        return self._settle(self._mover.wait())

    def frame_freed(self, frame: int) -> None:
        page, self._page_of[frame] = self._page_of[frame], NULL_PAGE
        self._frame_of[page] = NULL_PAGE
        self._num_clean -= self._durable[page]
        self._edits[page] = NULL_PAGE
        self._fetches.pop(frame, None)

    def page_freed(self, page: int) -> None:
        self._num_durable -= self._durable[page]
        self._num_clean -= self._durable[page] and self._frame_of[page] != NULL_PAGE
        self._durable[page] = False

    def _place(self, page: int, frame: int) -> None:
        assert self._page_of[frame] == NULL_PAGE
        self._frame_of[page] = frame
        self._page_of[frame] = page
        self._edits[page] = frame

    def _settle(self, done: list[Transfer]) -> list[Transfer]:
        for page, frame in done:
            held = self._backing.pop(page)
            assert held == frame
            self._durable[page] = True
        self._num_durable += len(done)
        self._num_clean += len(done)  # each page still has its frame, which was held
        return done

    # -- what steps are told ------------------------------------------------------------------

    def take_edits(self) -> CopyEdits:
        edits = CopyEdits(
            tuple(Transfer(page, frame) for page, frame in self._edits.items()),
            tuple(Transfer(page, frame) for frame, page in self._fetches.items()),
        )
        self._edits, self._fetches = {}, {}
        return edits

    def put_back(self, edits: CopyEdits) -> None:
        """Repeat the edits in the next plan, because their plan was not carried out completely."""
        for page, _ in edits.frames:
            self._edits[page] = self._frame_of[page]
        for page, frame in edits.fetches:
            if self._frame_of[page] == frame and self._durable[page]:
                self._fetches[frame] = page

    # -- invariants ---------------------------------------------------------------------------

    def check(
        self, pages: Sequence[int], frames: Sequence[int], fail: Callable[[str], None]
    ) -> None:
        """Compare these records with the reference counts of all pages and frames, including the
        null ones. Calls `fail` for each problem."""
        found = Counter(self.state(page, count) for page, count in enumerate(pages) if page)
        if self.count(found[PageState.FREE]) != {state: found[state] for state in PageState}:
            fail("pages are miscounted by state")
        placed = {page: frame for page, frame in enumerate(self._frame_of) if frame}
        back = {page: frame for frame, page in enumerate(self._page_of) if page}
        if placed != back:
            fail("pages and frames do not name each other")
        for page, frame in placed.items():
            if not pages[page] or not frames[frame]:
                fail(f"page {page} and frame {frame} belong together but one of them is free")
        for frame, count in enumerate(frames):
            if frame != NULL_PAGE and bool(count) != bool(self._page_of[frame]):
                fail(f"frame {frame} is in use for no page, or free for one")
        for page, count in enumerate(pages):
            if page == NULL_PAGE:
                continue
            state = self.state(page, count)
            if state is PageState.FREE and self._durable[page]:
                fail(f"page {page} is free but counts as copied")
            if state in (PageState.FILLING, PageState.BACKING) and not self._frame_of[page]:
                fail(f"page {page} is {state.value} without a frame")
        for page, frame in self._backing.items():
            if self._frame_of[page] != frame:
                fail(f"page {page} left frame {frame} while it was being copied")
        for frame, page in self._fetches.items():
            if self._frame_of[page] != frame or not self._durable[page]:
                fail(f"page {page} is to be fetched into frame {frame}, which is not its own")
