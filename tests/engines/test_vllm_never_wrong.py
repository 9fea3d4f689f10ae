"""No answer is wrong: what gives wrong tokens in other connectors ends in the right tokens or in an error by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from .wrong_answers import ERROR, GROUPS, OURS, RIGHT, TokensOf, outcomes

pytestmark = pytest.mark.timeout(1800)

REASONS = {
    "another prompt's reference": "tag",
    "the reference of a shorter prompt": "tag",
    "another request's rows in its reference": "tag",
    "another number of ranks in its reference": "ranks of",
    "a reference from before the restart": "claim_s",
    "blocks of 32 tokens, decode's of 64": "tokens_per_row",
    "two prefill ranks, swapped or hidden in the reference": "rank of",
}
"""What the error of a case says. All other cases end in the right tokens."""


@pytest.mark.parametrize("group", GROUPS)
def test_no_answer_is_wrong(group: str, model: Path, tmp_path: Path, tokens_of: TokensOf) -> None:
    for one in outcomes(group, OURS, model, tmp_path, tokens_of):
        assert one.outcome == (ERROR if one.case in REASONS else RIGHT), one
        assert REASONS.get(one.case, "") in one.reason, one
