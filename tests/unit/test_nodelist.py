"""Nodelists: expanded, folded and refused, as Slurm and ClusterShell do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scontrol import Scontrol, scontrol  # noqa: F401  # a fixture
from tf4slurm.errors import NodelistError
from tf4slurm.slurm.nodelist import MAX_NODES, expand_nodelist, fold_nodelist


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[001-003],gpu7", "n001 n002 n003 gpu7"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11]", "n09 n10 n11"),
        ("n[9-010]", "n9 n10"),  # the first number has the width
        ("n[099-101]", "n099 n100 n101"),
        ("tf[010,9-11]", "tf010 tf9 tf10 tf11"),
        ("n[3,1,2,1]", "n3 n1 n2 n1"),
        ("a[1-2],a[1-2]", "a1 a2 a1 a2"),
        ("r1-n[2,9-10],gpu-09", "r1-n2 r1-n9 r1-n10 gpu-09"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("a[1-2]b[3-4]c[5-6]", "a1b3c5 a1b3c6 a2b3c5 a2b3c6 a1b4c5 a1b4c6 a2b4c5 a2b4c6"),
        ("a[1,2][3-4,9][5]", "a135 a235 a145 a245 a195 a295"),
        ("n[1-2].dom[3]", "n1.dom3 n2.dom3"),
        ("n1-ib,n2.example.org,N_3", "n1-ib n2.example.org N_3"),
        ("[1-2],7", "1 2 7"),
        ("n[0-0,00-01]", "n0 n00 n01"),
        (",a,, b\tc\nd[1-2],", "a b c d1 d2"),
        ("n[18446744073709551613-18446744073709551614]", "n18446744073709551613 n18446744073709551614"),
    ],
)
def test_expand(nodelist: str, expected: str) -> None:
    assert expand_nodelist(nodelist) == tuple(expected.split())


@pytest.mark.parametrize(
    ("nodelist", "position", "what"),
    [
        ("", 0, "no node"),
        (" ,\n", 0, "no node"),
        ("n[3-1]", 2, "reversed"),
        ("n[1-2,5-4]", 6, "reversed"),
        ("n[]", 2, "'' is not a range"),
        ("n[1,,2]", 4, "'' is not a range"),
        ("n[1-]", 2, "'1-' is not a range"),
        ("n[-1]", 2, "'-1' is not a range"),
        ("n[1--2]", 2, "'1--2' is not a range"),
        ("n[1-2-3]", 2, "not a range"),
        ("n[1-10:2]", 2, "not a range"),
        ("n[a-b]", 2, "not a range"),
        ("n[1, 2]", 4, "' 2' is not a range"),
        ("n[١]", 2, "not a range"),
        ("a,n[1", 3, "not closed"),
        ("n[1[2-3]]", 1, "not closed"),
        ("n1]", 2, "is not valid in a name"),
        ("n[1-2]]", 6, "is not valid in a name"),
        ("(null)", 0, "is not valid in a name"),
        ("n{1,2}", 1, "is not valid in a name"),
        ("n[1-2]x", 6, "'x' follows the last bracket"),
        ("m,n[1-2]-ib,o", 8, "'-ib' follows the last bracket"),
        ("n[1-65537]", 2, "more than the 65536 nodes"),
        ("n[18446744073709551615]", 2, "greater than Slurm.s largest number"),
        ("m,n18446744073709551617", 2, "greater than Slurm.s largest number"),
        ("n[" + "0" * 300 + "]", 2, "not a range"),
        ("n" * 256, 0, "more than 255 characters"),
        ("a," + "n" * 250 + "[000001-2]", 2, "more than 255 characters"),
        (",".join(["n[1-65536]"] * 20), 165, f"more than {MAX_NODES} nodes"),
        ("a[1-65536]b[1-65536]c[1-65536]", 0, f"more than {MAX_NODES} nodes"),
    ],
)
def test_invalid_nodelist_is_refused_with_the_position(nodelist: str, position: int, what: str) -> None:
    with pytest.raises(NodelistError, match=what) as caught:
        expand_nodelist(nodelist)
    assert (caught.value.nodelist, caught.value.position) == (nodelist, position)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("n1", "n1"),
        ("n1 n2 n3", "n[1-3]"),
        ("n3 n2 n1", "n[3,2,1]"),
        ("n1 n1 n2", "n[1,1-2]"),
        ("n9 n10 gpu7", "n[9-10],gpu7"),
        ("n09 n10 n11", "n[09-11]"),
        ("n9 n010 n10", "n[9,010,10]"),
        ("n1 n01 n001", "n[1,01,001]"),
        ("a1 b1 a2", "a1,b1,a2"),
        ("n n n1 n1x", "n,n,n1,n1x"),
        ("1 2", "[1-2]"),
    ],
)
def test_fold(nodes: str, expected: str) -> None:
    assert fold_nodelist(nodes.split()) == expected
    assert expand_nodelist(expected) == tuple(nodes.split())


@pytest.mark.parametrize("name", ["", "n[1-2]", "a,b", "a b", "(null)", "n" * 256, "n18446744073709551615"])
def test_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(NodelistError) as caught:
        fold_nodelist(["n1", name])
    assert caught.value.nodelist == name


def test_folding_no_names_is_refused() -> None:
    with pytest.raises(NodelistError, match="no node"):
        fold_nodelist([])


@pytest.mark.parametrize(
    ("first", "last"), [(1, 10000), (0, 999), (998, 1001), (1000, 1000), (1999, 4002), (12345, 65536)]
)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 9])
def test_long_ranges(first: int, last: int, width: int) -> None:
    names = expand_nodelist(f"n[{first:0{width}}-{last}]")
    width = len(f"{first:0{width}}")
    assert names == tuple(f"n{number:0{width}}" for number in range(first, last + 1))


def test_long_ranges_are_split() -> None:
    nodes = expand_nodelist("n[1-65536],n[65537-70000]")
    assert fold_nodelist(nodes) == "n[1-65536,65537-70000]"


PREFIXES = st.sampled_from(["n", "r1-n", "gpu-", "N_", "a.b", "", "node", "x0y"])
NUMBERS = st.tuples(st.integers(0, 1200), st.integers(1, 5)).map(lambda pair: f"{pair[0]:0{pair[1]}}")
NAMES = st.tuples(PREFIXES, NUMBERS, st.sampled_from(["", "-ib", "x", ".dom"])).map("".join)


def nodelists(ranges: st.SearchStrategy[str], max_brackets: int) -> st.SearchStrategy[str]:
    brackets = st.lists(ranges, min_size=1, max_size=3).map(lambda items: f"[{','.join(items)}]")
    bracketed = st.lists(st.tuples(PREFIXES, brackets).map("".join), min_size=1, max_size=max_brackets).map("".join)
    terms = st.lists(st.one_of(NAMES, bracketed), min_size=1, max_size=5)
    return terms.map(",".join).filter(lambda text: not text.startswith("-"))


FIRST_AND_MORE = st.tuples(NUMBERS, st.integers(0, 5))
RANGES = st.one_of(NUMBERS, FIRST_AND_MORE.map(lambda pair: f"{pair[0]}-{int(pair[0]) + pair[1]}"))
EVEN_RANGES = FIRST_AND_MORE.map(lambda pair: f"{pair[0]}-{int(pair[0]) + pair[1]:0{len(pair[0])}}")
BROKEN = st.text("n019[]-, x.", max_size=20).filter(lambda text: not text.startswith("-"))


@given(nodelist=nodelists(RANGES, 3))
@settings(max_examples=100)
def test_slurm_expands_the_same(scontrol: Scontrol, nodelist: str) -> None:  # noqa: F811
    assert expand_nodelist(nodelist) == scontrol.expand(nodelist)


@given(nodelist=BROKEN)
@settings(max_examples=200)
def test_slurm_expands_every_valid_nodelist_the_same(scontrol: Scontrol, nodelist: str) -> None:  # noqa: F811
    try:
        nodes = expand_nodelist(nodelist)
    except NodelistError:
        return
    assert nodes == scontrol.expand(nodelist)


@given(nodes=st.lists(NAMES, min_size=1, max_size=30).filter(lambda names: not names[0].startswith("-")))
@settings(max_examples=100)
def test_slurm_folds_the_same(scontrol: Scontrol, nodes: list[str]) -> None:  # noqa: F811
    assert fold_nodelist(nodes) == scontrol.fold(",".join(nodes))


@given(nodes=st.lists(NAMES, min_size=1, max_size=40))
def test_fold_and_expand_round_trip(nodes: list[str]) -> None:
    assert list(expand_nodelist(fold_nodelist(nodes))) == nodes


@given(nodelist=nodelists(EVEN_RANGES, 1))
@settings(max_examples=50)
def test_cluster_shell_expands_the_same(nodelist: str) -> None:
    from ClusterShell.NodeSet import NodeSet  # type: ignore[import-untyped]  # it ships no types

    ours = set(expand_nodelist(nodelist))
    assert set(NodeSet(nodelist)) == ours
    assert set(NodeSet(fold_nodelist(sorted(ours)))) == ours
