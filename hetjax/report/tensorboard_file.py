"""TensorBoard's event files as records of bytes, for somebody else to write.

tensorboardX's own writer puts events into a queue that a thread empties. The thread ends when the
disk is full, and who fills the queue then waits for ever.
"""

from __future__ import annotations

import importlib
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any


def event_file_name() -> str:
    """A name for an event file that begins now; TensorBoard reads a folder's in their order."""
    return f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"


def first_records(first_step: int) -> bytes:
    """What an event file begins with: its format, and which steps of earlier files to forget.

    Args:
        first_step: the first step that the file will hold.

    Returns:
        Two records.
    """
    messages = _messages("event")
    restart = messages.SessionLog(status=messages.SessionLog.START)
    return _record(file_version="brain.Event:2") + _record(step=first_step, session_log=restart)


def scalars_record(step: int, values: Mapping[str, float]) -> bytes:
    """The figures of a step.

    Args:
        step: the number of the step.
        values: the figures by name.

    Returns:
        One record.
    """
    from tensorboardX.summary import scalar

    found = [each for name, value in values.items() for each in scalar(name, value).value]
    return _record(step=step, summary=_messages("summary").Summary(value=found))


def _record(**fields: Any) -> bytes:
    """An event as a record: its length and its bytes, each followed by a checksum."""
    from tensorboardX.record_writer import masked_crc32c

    event = _messages("event").Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(event))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, event)]
    return length + checksums[0] + event + checksums[1]


def _messages(name: str) -> Any:
    # The generated modules name their classes at run time, where no type checker sees them.
    return importlib.import_module(f"tensorboardX.proto.{name}_pb2")
