"""What of a command's output is kept while it streams: the head and the tail, in bounded memory."""

from __future__ import annotations


class HeadTail:
    """Keeps the first and the last `limit // 2` bytes of a stream and counts the rest.

    Example: limit 4 and the bytes b"abcdefg" give b"ab\\n[... 3 bytes left out ...]\\nfg".
    """

    def __init__(self, limit: int):
        assert limit >= 2
        self.half = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.seen = 0

    def add(self, chunk: bytes) -> None:
        self.seen += len(chunk)
        room = self.half - len(self.head)
        self.head += chunk[:room]
        self.tail += chunk[room:]
        if len(self.tail) > 4 * self.half + 65536:  # trimming now and then, not at every chunk
            del self.tail[:-self.half]

    def data(self) -> bytes:
        left_out = self.seen - len(self.head) - self.half
        if left_out <= 0:
            return bytes(self.head + self.tail)
        return b"%s\n[... %d bytes left out ...]\n%s" % (self.head, left_out, self.tail[-self.half:])

    def text(self) -> str:
        """Decoded with replacement: a cut inside a character, or output in another encoding, is no error."""
        return self.data().decode("utf-8", "replace")
