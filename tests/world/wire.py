"""What pytest and a rank say to each other, and how it travels."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Call:
    """Run `case` ("module:qualname") with these arguments."""

    case: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Returned:
    """The case returned `value`. The first that comes says that the process group is up."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The case raised; `text` is "Type: message" and the rank's traceback below it."""

    text: str


def send(connection: Connection, message: Call | Returned | Raised | None) -> None:
    """None: take the process group down and exit."""
    # Plain pickle, not Connection.send: that one would move tensors through shared memory,
    # which the sending rank may not live long enough to serve.
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """The next message; EOFError or ConnectionError when the other side is gone."""
    return pickle.loads(connection.recv_bytes())
