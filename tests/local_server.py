"""A server of the tests on this machine: a context manager, with a thread of its own."""

import threading
from http.server import ThreadingHTTPServer


class LocalServer(ThreadingHTTPServer):
    """Answers on a free port of 127.0.0.1 while it is entered.

    Args:
        handler: the class of its requests.
    """

    daemon_threads, request_queue_size = True, 64  # a connection beyond waits a second

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that has gone is no news."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"
