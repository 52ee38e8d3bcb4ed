"""mlx-lm's server under `install`: a request that fails after it has begun gets an error.

The server answers what fails before that by itself. Later it lets the exception end the connection, without an answer.
A pool raises later, too: it may run out of blocks, or hold other bits than the server's ``kv_bits``.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

from mlx_lm.server import APIHandler

from kvpool.adapters.mlx_lm.attention import Site

_log = logging.getLogger(__name__)


def _answering(original: Any) -> Any:
    @functools.wraps(original)
    def handle_completion(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except OSError:  # the client is gone
            raise
        except Exception as error:
            _log.exception("a request to mlx-lm's server failed")
            _answer(self, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())

    return handle_completion


def _answer(handler: Any, body: bytes) -> None:
    """Send an error: status 500 if the head of the answer still waits, else an event of the stream."""
    if handler._headers_buffer:
        handler._headers_buffer.clear()
        handler._set_completion_headers(500)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
    else:
        body = b"data: " + body + b"\n\n"
    handler.wfile.write(body)
    handler.wfile.flush()


SERVER = Site(APIHandler, "handle_completion", _answering)
