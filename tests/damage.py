"""A malicious pickle and a full disk."""

import errno
import io
import os


class Payload:
    """Create a folder when it is unpickled, which shows that code was executed."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


class FullDisk(io.BytesIO):
    """A file that raises ENOSPC after `room` bytes."""

    def __init__(self, file, room):
        super().__init__()
        self.file, self.room = file, room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def flush(self):
        self.file.flush()
