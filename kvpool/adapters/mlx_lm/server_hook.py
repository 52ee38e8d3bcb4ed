"""mlx-lm's server under `install`: a request that fails after it has begun gets an error.

The server answers what fails before that by itself. Later it lets the exception end the connection, without an answer.
A pool raises later, too: it may run out of blocks, or hold other bits than the server's ``kv_bits``.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

from kvpool.adapters.mlx_lm.attention import Site

_log = logging.getLogger(__name__)


def _answering(original: Any) -> Any:
    @functools.wraps(original)
    def handle_completion(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except ConnectionError:  # the client is gone
            raise
        except Exception as error:
            _log.exception("a request to mlx-lm's server failed")
            _answer(self, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())

    return handle_completion


def _answer(handler: Any, body: bytes) -> None:
    """Send an error: status 500 if no head of an answer was sent, else an event of the stream."""
    if getattr(handler, "_headers_buffer", True):  # there is none before the first line of a head
        handler._headers_buffer = []
        handler._set_completion_headers(500)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
    else:
        body = b"data: " + body + b"\n\n"
    handler.wfile.write(body)
    handler.wfile.flush()


def server_sites() -> tuple[Site, ...]:
    """Return what `install` replaces in mlx-lm's server: nothing where a release has that elsewhere."""
    try:
        from mlx_lm.server import APIHandler
    except ImportError:
        return ()
    site = Site(APIHandler, "handle_completion", _answering)
    return (site,) if site.name in vars(APIHandler) else ()
