"""The prose of pages and docstrings: processes are named, verbs are those of the field, sentences end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT, name_of

SOURCE = ROOT / "src" / "disagg_kv"
OTHER_PAGES = tuple(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))

MOST_WORDS = 40
"""Words of a sentence in a page."""

WORDS = re.compile(
    r"\b(anybody|everybody|nobody|somebody|whoever|whomever|told|tells|telling|heard|hears|hearing|rumou?rs?|"
    r"so (many|long|much|often)|by now|under way|for ever|let go|lets go|looked at|looks at|last words|nudge[sd]?|"
    r"goes round|going round|see to it|sees to it|has? said|have said)\b",
    re.IGNORECASE,
)
CODE = re.compile(r"^```.*?^```|``.*?``|`[^`]*`", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^\s*(?:[*-]|\d+\.|#+|!!!)\s+|^\s*$|\s*\|\s*", re.MULTILINE)
LINK = re.compile(r"\]\([^)]*\)|<!--.*?-->", re.DOTALL)


def prose(text: str) -> str:
    """Text without code blocks, inline code, link targets and comments."""
    return LINK.sub("]", CODE.sub("code", text))


def odd_words(text: str) -> list[str]:
    return [found[0].lower() for found in WORDS.finditer(prose(text))]


def long_sentences(text: str) -> list[str]:
    """Sentences of more than MOST_WORDS words; paragraphs, list items, headings and table cells end a sentence."""
    parts = (sentence for part in ITEM.split(prose(text)) for sentence in re.split(r"(?<=[.?!])\s", part))
    return [sentence for sentence in parts if len(sentence.split()) > MOST_WORDS]


def docstrings(source: str) -> Iterator[str]:
    """Every string that stands alone: docstrings, and those below a constant or an attribute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=name_of)
def test_a_page_has_no_odd_words(page: Path) -> None:
    assert odd_words(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_no_sentence_that_must_be_read_twice(page: Path) -> None:
    assert long_sentences(page.read_text()) == []


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_docstrings_have_no_odd_words(file: Path) -> None:
    assert {text: words for text in docstrings(file.read_text()) if (words := odd_words(text))} == {}


def test_the_checker_finds_words_and_long_sentences_outside_of_code() -> None:
    assert odd_words("Nobody is told; so\nmany `told` ones.\n\n```text\nheard\n```\n[a](nobody.md)") == [
        "nobody",
        "told",
    ]
    assert odd_words("so many, BY NOW") == ["so many", "by now"]
    words = "word " * (MOST_WORDS - 1) + "word"
    assert long_sentences(f"{words}. {words}.\n\n* {words}\n* {words}\n\n| {words} | {words} |") == []
    assert len(long_sentences(f"Short. {words} more.\n\n* {words} `a b` more\n")) == 2
    assert list(docstrings('"""One."""\nx = 1\n"""Two."""\ny = "three"\n')) == ["One.", "Two."]
