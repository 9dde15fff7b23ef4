"""The quick run's few cases show what the product shows."""

from __future__ import annotations

from itertools import product

from tests.quick.sampling import Case, cover, shown_by
from tests.training.options import OFFLOADED, Options

PRODUCT: list[Case] = [tuple(zip("abc", c, strict=True)) for c in product("123", "tuvwxyz", "ab")]


def test_few_cases_show_every_value() -> None:
    chosen = cover(PRODUCT)
    seen = {value for at in chosen for value in PRODUCT[at]}
    assert seen == {value for case in PRODUCT for value in case}
    assert len(chosen) == 7, "as many as the largest parameter has"
    for at in chosen[-1:]:
        others = {value for one in chosen if one != at for value in PRODUCT[one]}
        assert {*PRODUCT[at]} - others, "the last was chosen for nothing"


def test_what_is_taken_in_any_event_counts() -> None:
    begin = [0, len(PRODUCT) - 1]
    chosen = cover(PRODUCT, begin)
    assert chosen[:2] == begin
    assert len(chosen) == 7, "both are among the seven"


def test_options_show_what_is_asked_for() -> None:
    shown = shown_by({"options": Options(2, **OFFLOADED), "flush": "upstream"})
    assert shown == (("flush", "'upstream'"), ("offload", "('optimizer',)"), ("stage", "2"))
