"""Whatever an engine gives to a public call: a named error at once, or a legal value; and innocent rooms end well."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.junk.__main__ import missing
from tests.junk.bench import Bench, attempt
from tests.junk.calls import CALLS
from tests.junk.values import JUNK


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """Real endpoints with their own threads, which all examples share: nothing may be left of an earlier one."""
    logging.getLogger("disagg_kv").setLevel(logging.CRITICAL)
    made = Bench()
    yield made
    made.close()
    logging.getLogger("disagg_kv").setLevel(logging.NOTSET)


def test_every_public_call_and_each_of_its_arguments_is_covered() -> None:
    """A new method, function or argument needs an entry in the table."""
    assert missing() == []


ONE = st.sampled_from([name for name in CALLS if CALLS[name].kinds]).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(list(CALLS[name].kinds)), st.sampled_from(list(JUNK)))
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(calls=st.lists(ONE, min_size=1, max_size=12))
def test_junk_is_refused_at_once_and_harms_no_other_room(bench: Bench, calls: list[tuple[str, str, str]]) -> None:
    """Several calls of any kind while an innocent room is half way; its bytes are compared when it has ended."""
    with bench.innocent():
        verdicts = [attempt(bench, CALLS[name], argument, junk) for name, argument, junk in calls]
    assert [str(verdict) for verdict in verdicts if verdict.wrong] == []
