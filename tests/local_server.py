"""An HTTP server on this machine, in a thread, as a context manager."""

import threading
from http.server import ThreadingHTTPServer


class LocalServer(ThreadingHTTPServer):
    """Serves on a free port of 127.0.0.1 inside a `with` block."""

    daemon_threads, request_queue_size = True, 64  # further connections wait a second

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Ignore clients that disconnect."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"
