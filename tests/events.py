"""TensorBoard's files of events, read as TensorBoard reads them."""

import struct

import pytest


def read_events(path):
    """The events of a file; each check sum is right."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        (size,), (sum_of_size,) = struct.unpack("<Q", data[at : at + 8]), struct.unpack("<I", data[at + 8 : at + 12])
        said = data[at + 12 : at + 12 + size]
        (sum_of_said,) = struct.unpack("<I", data[at + 12 + size : at + 16 + size])
        assert (sum_of_size, sum_of_said) == (masked_crc32c(data[at : at + 8]), masked_crc32c(said))
        found.append(Event.FromString(said))
        at += 16 + size
    return found


def scalars(folder):
    """Those that TensorBoard shows of a folder, {name: [(step, value, wall time)]}: where a run restarts, later go."""
    found = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in read_events(path):
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                found = {name: [each for each in of if each[0] < event.step] for name, of in found.items()}
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found.setdefault(value.tag, []).append((event.step, value.simple_value, event.wall_time))
    return found
