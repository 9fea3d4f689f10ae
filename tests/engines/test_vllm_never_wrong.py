"""No answer is wrong: what gives wrong tokens in other connectors ends in the right tokens or in an error by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from .wrong_answers import ERROR, GROUPS, OURS, RIGHT, TokensOf, outcomes

pytestmark = pytest.mark.timeout(1800)

REASONS = {
    "a reference that was used, its blocks overwritten": "",
    "another prompt's reference": "tag",
    "the reference of a shorter prompt": "tag",
    "another request's rows in its reference": "tag",
    "another number of ranks in its reference": "",
    "a reference from before the restart": "",
    "blocks of 32 tokens, decode's of 64": "tokens_per_row",
    "two prefill ranks, swapped or hidden in the reference": "",
}
"""What the errors say."""


@pytest.mark.parametrize("group", GROUPS)
def test_no_answer_is_wrong(group: str, model: Path, tmp_path: Path, tokens_of: TokensOf) -> None:
    found = outcomes(group, OURS, model, tmp_path, tokens_of)
    print(*found, sep="\n")
    for one in found:
        if one.case in REASONS:
            assert one.outcome in (RIGHT, ERROR), one
            assert one.outcome == RIGHT or one.reason
            assert REASONS[one.case] in one.reason, one
        else:
            assert one.outcome == RIGHT, one
