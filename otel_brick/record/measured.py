"""The verbs without a scope: timers, rows whose duration somebody else measured, and tokens."""

from __future__ import annotations

from datetime import timedelta

from ..taxonomy import BrickCategory, BrickId
from .descriptors import OVERFLOW_NAME, count_argument
from .lane import TAG_COMPRESSED, IdleLane
from .recorder import Recorder
from .timers import BrickTimer, elapsed_argument
from .verbs import OMITTED, ScopeVerbs, count_arguments, count_tags


class Verbs(ScopeVerbs):
    """Everything a user calls to say that something happens."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._bare_sites: dict[tuple[BrickId | str, bool], int] = {}

    def start_brick(self, brick: BrickId) -> BrickTimer:
        """Start a known brick; `stop_brick` ends it. On a disabled profiler the timer is dead.

        Raises:
            TypeError: not a `BrickId`; `start` takes names.
        """
        if self._refuses():
            return BrickTimer(self._recorder, None)
        if not isinstance(brick, BrickId):
            raise TypeError(f"brick must be a BrickId, not {type(brick).__name__}; start() takes names")
        return BrickTimer(self._recorder, self._bare_site(brick))

    def start(self, name: str, *, exact: bool = False) -> BrickTimer:
        """Start a brick by name or alias; `stop` ends it. On a disabled profiler the timer is dead.

        Raises:
            TypeError, ValueError: the name is not a string or empty.
        """
        if self._refuses():
            return BrickTimer(self._recorder, None)
        return BrickTimer(self._recorder, self._bare_site(name, exact=exact, argument="name"))

    def stop(
        self,
        timer: BrickTimer,
        elements: int = OMITTED,
        *,
        bytes_read: int = OMITTED,
        bytes_written: int = OMITTED,
    ) -> None:
        """End a started brick with counts that may be known only now; a dead timer is ignored.

        Raises:
            TypeError, ValueError: a count is not an integer from 0 to 2**63 - 1; the timer goes on then.
        """
        if not isinstance(timer, BrickTimer):
            raise TypeError(f"timer must be a BrickTimer, not {type(timer).__name__} ({timer!r})")
        timer.stop(count_tags(*count_arguments(elements, bytes_read, bytes_written)) if timer.running else ())

    stop_brick = stop

    def record_elapsed(
        self,
        name: BrickId | str,
        elapsed: int | timedelta,
        elements: int = OMITTED,
        *,
        category: BrickCategory | None = None,
        bytes_read: int = OMITTED,
        bytes_written: int = OMITTED,
    ) -> None:
        """Record a brick that ends now and took `elapsed`, integer nanoseconds or a `timedelta`.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is recorded then.
        """
        if self._refuses():
            return
        nanoseconds = elapsed_argument(elapsed)
        tags = count_tags(*count_arguments(elements, bytes_read, bytes_written))
        self._complete(self._bare_site(name, category, argument="name"), nanoseconds, tags)

    def record_elapsed_with_bytes(
        self,
        name: BrickId | str,
        elapsed: int | timedelta,
        elements: int,
        input_bytes: int,
        output_bytes: int,
    ) -> None:
        """Record a brick that read `input_bytes` and wrote them compressed as `output_bytes`.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is recorded then.
        """
        if self._refuses():
            return
        nanoseconds = elapsed_argument(elapsed)
        tags = count_tags(
            count_argument("elements", elements),
            count_argument("input_bytes", input_bytes),
            count_argument("output_bytes", output_bytes),
        )
        self._complete(self._bare_site(name, argument="name"), nanoseconds, (*tags, TAG_COMPRESSED, 1))

    def add_tokens(self, count: int) -> None:
        """Add to the tokens of the current step; outside every step nothing is counted.

        Raises:
            TypeError, ValueError: `count` is not an integer from 0 to 2**63 - 1.
        """
        if self._refuses():
            return
        number = count_argument("count", count)
        lane = self._recorder.current.get()
        if not isinstance(lane, IdleLane):
            with lane.record.lock:
                lane.record.tokens += number

    def _bare_site(
        self,
        brick: BrickId | str,
        category: BrickCategory | None = None,
        *,
        exact: bool = False,
        argument: str = "brick",
    ) -> int:
        if brick.__class__ is str or brick.__class__ is BrickId:
            site = self._bare_sites.get((brick, exact)) if category is None else None
            if site is not None:
                return site
        registry = self._recorder.registry
        described = registry.brick(brick, category, exact=exact, argument=argument)
        site = registry.bare_site(registry.descriptor(described))
        if described.name != OVERFLOW_NAME:
            self._bare_sites[brick, exact] = site
        return site

    def _complete(self, site: int, elapsed_ns: int, tags: tuple[int, ...]) -> None:
        end = self._recorder.clock.now()
        self._recorder.current.get().complete((site, end - elapsed_ns, ~site, end, *tags))
