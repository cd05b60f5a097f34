"""A page for a conversation, served to this machine alone, at an address that only its user knows."""

import contextlib
import hmac
import html
import json
import re
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from crius.data.documents import is_utf8
from crius.errors import CriusError
from crius.redact import redact
from crius.tools.generate.chat import Chat, Stopped
from crius.tools.generate.settings import Message, Settings, is_message
from crius.untrusted import SMALL, parse_json, text_named

_HOST = "127.0.0.1"
_PAGE = Path(__file__).with_name("chat.html")
_POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _Refused(Exception):
    """A request gets the status and the reason that are its arguments."""


class Server(ThreadingHTTPServer):
    """Serves the page, and answers one question at a time.

    Args:
        chats: models, whose answers stand side by side.
        settings: settings that were checked.

    Attributes:
        stop: set to stop the answer that is being written.
        lock: held while an answer is computed.
        token: part of the address that no other page knows.
        origin: the address without it.
    """

    daemon_threads = False  # server_close waits for them

    def __init__(self, chats: Sequence[Chat], settings: Settings) -> None:
        super().__init__((_HOST, 0), _Handler)
        self.chats = chats
        self.settings = settings
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.token = secrets.token_urlsafe(32)
        self.origin = f"http://{_HOST}:{self.server_port}"
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See the base class; the connection is noted."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """See the base class."""
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a mistake, but nothing about a browser that went away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """End the answer, all connections and their threads."""
        self.stop.set()
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a browser may be silent, or not read

    def do_GET(self) -> None:
        """Send the page."""
        self._respond({"": self._send_page})

    def do_POST(self) -> None:
        """Answer a question, or stop an answer."""
        self._respond({"ask": self._ask, "stop": self._stop})

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a line would have the token."""

    def _respond(self, routes: dict[str, Any]) -> None:
        try:
            self._check()
            name = self.path.split("/", 2)[2]
            if name not in routes:
                raise _Refused(404, "there is no such page.")
            routes[name]()
        except _Refused as refused:
            status, reason = refused.args
            self._begin(status, "application/json")
            self._send({"error": reason})
            self._end()

    def _check(self) -> None:
        """Raise _Refused unless the request comes from the page itself, or from its address in a browser."""
        server = self.server
        token, slash, _ = self.path.removeprefix("/").partition("/")
        is_known = hmac.compare_digest(token.encode(), server.token.encode()) and bool(slash)
        is_here = f"http://{self.headers.get('Host')}" == server.origin
        if not (is_known and is_here and self.headers.get("Origin", server.origin) == server.origin):
            raise _Refused(403, "this is not the address that crius chat printed.")

    def _begin(self, status: int, kind: str, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
            "Transfer-Encoding": "chunked",
            "Connection": "close",
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, value: str | dict[str, Any]) -> None:
        """Send text, or a line of JSON, as one chunk."""
        data = (value if isinstance(value, str) else json.dumps(value) + "\n").encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        names = html.escape(json.dumps([redact(chat.name) for chat in self.server.chats]))
        self._begin(200, "text/html", _POLICY.format(nonce))
        self._send(text_named(_PAGE).replace("NONCE", nonce).replace("NAMES", names))
        self._end()

    def _stop(self) -> None:
        self.server.stop.set()
        self._begin(200, "application/json")
        self._send({})
        self._end()

    def _ask(self) -> None:
        chat, messages = self._question()
        server = self.server
        if not server.lock.acquire(blocking=False):
            raise _Refused(409, "another answer is being written: stop it, or wait for its end.")
        try:
            server.stop.clear()
            self._begin(200, "application/x-ndjson")
            last = self._answer(chat, messages)
        finally:
            server.lock.release()
        self._send(last)  # who has read it may ask again
        self._end()

    def _question(self) -> tuple[Chat, list[Message]]:
        """The model and the conversation in the body of the request."""
        length = self.headers.get("Content-Length", "")
        size = int(length) if re.fullmatch("[0-9]{1,8}", length) else 0
        content = self.rfile.read(min(size, 16 * SMALL))  # a browser that may not send all of it reads no reason
        if not 0 < size <= SMALL:
            raise _Refused(413, f"a conversation has at most {SMALL:,} bytes.")
        try:
            asked = parse_json(content)
            chat = self.server.chats[asked["model"]]
            messages = asked["messages"]
            is_right = bool(messages) and all(is_message(one) and is_utf8("".join(one.values())) for one in messages)
        except (ValueError, TypeError, LookupError):
            is_right = False
        if not is_right:
            raise _Refused(400, "this is not a conversation.")
        return chat, [{key: one[key] for key in ("role", "content")} for one in messages]

    def _answer(self, chat: Chat, messages: list[Message]) -> dict[str, Any]:
        """Send the text of the answer as it comes. Returns the last line."""

        def on_text(text: str) -> None:
            if self.server.stop.is_set():
                raise Stopped
            if text:
                self._send({"text": text})

        try:
            turn = chat.answer(messages, self.server.settings, on_text)
        except CriusError as error:
            return {"error": redact(" ".join(str(error).split()))}
        return {"told": turn.lines, "left": turn.num_left}


def serve(chats: Sequence[Chat], settings: Settings) -> None:
    """Serve the page until Ctrl-C.

    Args:
        chats: the model, and one that it is compared with.
        settings: settings that were checked.

    Raises:
        KeyboardInterrupt: it came; nothing of the server is left.
    """
    server = Server(chats, settings)
    sys.stdout.write(f"{server.origin}/{server.token}/\n")
    sys.stdout.flush()
    sys.stderr.write("Open this address in a browser of this machine. Ctrl-C ends.\n")
    try:
        server.serve_forever()
    finally:
        server.server_close()
