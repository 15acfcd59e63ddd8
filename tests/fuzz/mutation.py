"""Mutations that know msgpack: the decoder is compiled, so coverage alone does not find the way in.

A message is taken apart without types, one or a few of its values are replaced, repeated, dropped
or swapped, and it is put together again: nearly valid, which random bytes never are.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import msgspec

ODD_VALUES: list[Any] = [
    *(0, 1, 2, 3, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "Propose", "BeginEpoch", "::1", "\0", "x" * 300, b"", b"\xff" * 40),
    *(None, True, False, [], [[]], [0] * 20, {}, {"a": 1}),
]
Mutate = Callable[[bytes, random.Random], bytes]


def _places(value: Any) -> list[tuple[list[Any], int]]:
    """Every (list, index) in a nested value."""
    found: list[tuple[list[Any], int]] = []
    if isinstance(value, list):
        for index, item in enumerate(value):
            found.append((value, index))
            found += _places(item)
    return found


def message(data: bytes, chance: random.Random) -> bytes:
    """One msgpack message, changed; as it is where it is none."""
    try:
        value = msgspec.msgpack.decode(data)
    except (ValueError, RecursionError):
        return data
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = _places(value)
        if not places:
            break
        parent, index = chance.choice(places)
        other, where = chance.choice(places)
        match chance.randrange(6):
            case 0:
                parent[index] = copy.deepcopy(chance.choice(ODD_VALUES))
            case 1 if isinstance(parent[index], int):
                parent[index] += chance.choice((-1, 1))
            case 2:
                del parent[index]
            case 3:
                parent.insert(index, parent[index])
            case 4:
                parent[index] = copy.deepcopy(other[where])
            case _:
                chance.shuffle(parent)
    try:
        return msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError):
        return data


def records(data: bytes, chance: random.Random) -> bytes:
    """Change, move, repeat or drop one of a row of records (length, choice, message)."""
    parts: list[tuple[int, bytes]] = []
    while len(data) >= 2:
        parts.append((data[1], data[2 : 2 + data[0]]))
        data = data[2 + data[0] :]
    if not parts:
        return data
    index = chance.randrange(len(parts))
    choice, record = parts[index]
    match chance.randrange(5):
        case 0:
            parts.insert(chance.randrange(len(parts)), parts[index])
        case 1 if len(parts) > 1:
            del parts[index]
        case 2:
            parts[index] = (chance.randrange(256), record)
        case _:
            parts[index] = (choice, message(record, chance)[:255])
    return b"".join(bytes([len(record), choice]) + record for choice, record in parts)


def handshake(data: bytes, chance: random.Random) -> bytes:
    """Change one of a row of handshake messages (magic, version, length, msgpack)."""
    parts: list[tuple[bytes, bytes]] = []
    while len(data) >= 7:
        length = int.from_bytes(data[5:7], "little")
        parts.append((data[:5], data[7 : 7 + length]))
        data = data[7 + length :]
    if not parts:
        return data
    index = chance.randrange(len(parts))
    parts[index] = (parts[index][0], message(parts[index][1], chance)[:65535])
    return b"".join(prefix + len(body).to_bytes(2, "little") + body for prefix, body in parts)


MUTATIONS: dict[str, Mutate] = {
    "control_message": message,
    "protocol_worker": records,
    "handshake_acceptor": handshake,
    "handshake_dialler": handshake,
    "handshake_in_tls": lambda data, chance: data[:1] + handshake(data[1:], chance),
}
