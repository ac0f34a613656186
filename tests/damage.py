"""Files that are damaged or malicious, and a disk that is full."""

import errno
import io
import os


class Payload:
    """Unpickling it makes a folder: the trace of code that was executed."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


class FullDisk(io.BytesIO):
    """A file on a disk that is full after some bytes."""

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
