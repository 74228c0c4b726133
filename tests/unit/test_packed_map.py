"""A packed map comes back as it was and is small, and whatever is not one is a MessageError."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_messages import ENTRY, NUMBER
from tf4slurm.control.messages import Map, Order, encode
from tf4slurm.control.packed_map import is_packed_map, pack_map, unpack_map
from tf4slurm.errors import MessageError

MANY = Map(
    1, tuple(("worker", index, f"node{index:05}", f"10.1.{index >> 8}.{index & 255}", 40001) for index in range(10_000))
)


@given(st.builds(Map, NUMBER, st.lists(ENTRY, min_size=1, max_size=5).map(tuple)))
def test_a_packed_map_comes_back(agreed: Map) -> None:
    assert unpack_map(pack_map(agreed)) == agreed


def test_the_map_of_10_000_tasks_is_packed_small() -> None:
    packed = pack_map(MANY)
    assert is_packed_map(packed)
    assert not is_packed_map(encode(MANY))
    assert unpack_map(packed) == MANY
    assert len(packed) < 200_000


def test_a_map_with_ports_of_chance_is_packed_to_little_more_than_these() -> None:
    chance = random.Random(7)
    entries = tuple((*entry[:4], chance.randrange(32_768, 61_000)) for entry in MANY.entries)
    assert len(pack_map(Map(1, entries))) < 2 * 2 * len(entries)  # a port is a number of 2 bytes


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"x",
        pack_map(MANY)[:-10],
        zlib.compress(b"[" * 100),
        zlib.compress(encode(Order())),
        zlib.compress(b'[1,1,"|ps","|0","|n","|h"]'),
        zlib.compress(b'[1,2,"||pp01","||01","||nn","||hh","|4|5|"]'),
        zlib.compress(b'[1,1,"|ps","|zero","|n","|h","|4"]'),
        zlib.compress(b'[1,1,"|ps","|true","|n","|h","|4"]'),
        zlib.compress(b'[1,1,"|ps",0,"|n","|h","|4"]'),
        zlib.compress(b'[1,1,"|ps",["|0"],"|n","|h","|4"]'),
        zlib.compress(b'[1,1,"|ps","0","|n","|h","|4"]'),
        zlib.compress(b'["1",1,"|ps","|0","|n","|h","|4"]'),
        zlib.compress(b'[1,0,"","","","",""]'),
        zlib.compress(b'[1,-1,"|ps","|0","|n","|h","|4"]'),
        zlib.compress(b'{"attempt":1}'),
        zlib.compress(bytes(100 * 2**20)),  # 100 MB in 100 KB
    ],
    ids=[
        *("nothing", "no zlib", "cut", "no JSON", "no map", "a column too few", "a port too many", "text for an index"),
        *("true for an index", "a number for a column", "a list for a column", "no mark before a value"),
        *("text for an attempt", "no tasks", "fewer than no tasks", "an object", "a bomb"),
    ],
)
def test_what_is_no_packed_map_is_refused_with_words(payload: bytes) -> None:
    with pytest.raises(MessageError, match="of this version of tf4slurm"):
        unpack_map(payload)
