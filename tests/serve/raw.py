"""HTTP by hand, for clients that no library lets one be: slow, rude or gone."""

from __future__ import annotations

import json
import socket
from typing import Any


def open_request(url: str, path: str, body: dict[str, Any], receive_buffer: int = 0) -> Any:
    """Send a request and return the socket, unread.

    Args:
        receive_buffer: bytes that the system takes for us at most, as it rounds it; 0 is its own.
    """
    host, port = url.removeprefix("http://").split(":")
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    return sock


def read_until(sock: Any, end: bytes) -> bytes:
    """All bytes until `end` has come, or the connection has ended."""
    found = b""
    while end not in found:
        part = sock.recv(65536)
        if not part:
            break
        found += part
    return found
