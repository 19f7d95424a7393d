"""A server in a thread that answers GET, HEAD, POST and PUT from a function."""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

# Status, headers besides the length, and body.
Answer = tuple[int, Mapping[str, str], bytes]


@contextmanager
def serve_answers(answer: Callable[[BaseHTTPRequestHandler], Answer]) -> Generator[str]:
    """Serve the results of `answer`; yield the server's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            # Closing a connection with unread bytes resets it, and its answer may be lost.
            sent = self.rfile.read(int(self.headers.get("content-length", 0)))
            self.rfile = BytesIO(sent)
            self.do_GET()

        do_PUT = do_POST

        def do_GET(self) -> None:
            status, headers, body = answer(self)
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Do nothing: a test prints no access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
