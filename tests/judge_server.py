"""A real HTTP server on a free port that behaves as badly as a test asks: for the judge's client and the judges."""

import json
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def completion(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def says(text):
    """A handler that answers properly."""
    return lambda h: reply(h, 200, completion(text))


def reply(h, status, body=b"", **headers):
    h.send_response(status)
    for name, value in {"Content-Length": len(body), **headers}.items():
        h.send_header(name.replace("_", "-"), str(value))
    h.end_headers()
    h.wfile.write(body)


def status(code, **headers):
    return lambda h: reply(h, code, b"go away, Bearer sk-secret", **headers)


def garbage(h):
    reply(h, 200, b"\xff\xfe<html>not JSON")


def no_http(h):
    h.wfile.write(b"\x00\x01 hello\r\n\r\n")


def hang(h):
    h.server.release.wait(20)


def drip(h):
    """Headers, then a byte now and then: no single read times out."""
    h.send_response(200)
    h.send_header("Content-Length", "100000")
    h.end_headers()
    while not h.server.release.wait(0.05):
        h.wfile.write(b" ")
        h.wfile.flush()


def endless_drip(h):
    """The same without a length: the end of the connection is the end of the body."""
    h.send_response(200)
    h.end_headers()
    h.wfile.write(completion("late"))
    while not h.server.release.wait(0.05):
        h.wfile.write(b" ")
        h.wfile.flush()


def drop(h):
    h.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset, not a goodbye
    h.connection.close()


def half_a_body(h):
    whole = completion("x" * 400)
    h.send_response(200)
    h.send_header("Content-Length", str(len(whole)))
    h.end_headers()
    h.wfile.write(whole[: len(whole) // 2])


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):  # a client that went away is what some tests are about
        pass


@contextmanager
def serving(*script, tls=None):
    """Answers the n-th request by script[n], later ones by the last; tls: folder of cert.pem and key.pem. Yields the server: `url`, `seen` (bodies),
    `headers`, `most` (requests under way at once)."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                act = script[min(len(server.seen), len(script) - 1)]
                server.seen.append(json.loads(body))
                server.headers.append(dict(self.headers))
                server.paths.append(self.path)
                server.under_way += 1
                server.most = max(server.most, server.under_way)
            try:
                act(self)
            finally:
                with lock:
                    server.under_way -= 1

        def log_message(self, *args):
            pass

    server = Server(("127.0.0.1", 0), Handler)
    server.seen, server.headers, server.paths, server.under_way, server.most = [], [], [], 0, 0
    server.release = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.url = server.url.replace("http://127.0.0.1", "https://localhost")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def slowly(seconds, act):
    def run(h):
        time.sleep(seconds)
        act(h)
    return run
