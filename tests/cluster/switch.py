"""An Ethernet switch in user space: links with a rate and a latency, which the kernel has only where netem is.

    host i --- uplink, rate R ---> switch --- downlink, rate R, then the latency ---> host k

A frame of n bytes leaves its uplink n / R after the one before it, or after it came. The downlink takes frames in the
order in which they leave uplinks, and passes a frame on while it still comes in (cut-through): alone, it arrives
n / R + latency after it was sent. No frame is lost: an uplink that is LEAD behind is not read until it has caught up,
and the frames of one host wait in the host. Each port carries R in both directions at once."""

import contextlib
import ctypes
import heapq
import os
import select
import time

LEAD = 5e-3  # seconds that an uplink may be behind with what was read from it
AT_ONCE = 16  # frames read from one port before the others have their turn
FRAME = 65536
FINE_TIMERS = 29  # PR_SET_TIMERSLACK
SOON = 50e-6  # seconds that are not worth sleeping


def serve(ports: list[int], mbits: float, ms: float, until: int) -> None:
    """Pass frames between the TAP devices `ports` until something, or the end, comes from the file `until`. Port i is
    the one of hardware address ...:i. mbits: 0 for as fast as it goes. ms: the latency of one way."""
    urgent()
    per_byte, latency = (8e-6 / mbits if mbits > 0 else 0.0), 1e-3 * ms
    number = {port: i for i, port in enumerate(ports)}
    up, down = [0.0] * len(ports), [0.0] * len(ports)  # when a link is free again
    events, order = [], 0  # (when, order, from host or None, to host or None, frame)
    reading, resting = [until, *ports], {}  # files that are read; ports that are not, until when
    now, push, pop = time.monotonic, heapq.heappush, heapq.heappop
    while True:
        wake = min(events[0][0] if events else now() + 60, *resting.values(), now() + 60)
        left = wake - now()
        ready = select.select(reading, [], [], left if left > SOON else 0)[0]  # epoll would wait for whole milliseconds
        if until in ready:
            return
        time_now = now()
        for port in [port for port, end in resting.items() if end <= time_now]:
            del resting[port]
            reading.append(port)
        for port in ready:
            source = number[port]
            for _ in range(AT_ONCE):
                try:
                    frame = os.read(port, FRAME)
                except BlockingIOError:
                    break
                up[source] = max(up[source], time_now) + len(frame) * per_byte
                order += 1
                push(events, (up[source], order, source, None, frame))
                if up[source] > time_now + LEAD:
                    resting[port] = up[source] - LEAD / 2
                    reading.remove(port)
                    break
        while events and events[0][0] <= time_now:
            when, _, source, to, frame = pop(events)
            if to is not None:
                os.write(ports[to], frame)
                continue
            whole = frame[0] & 1  # to all, as who asks for an address does
            for to in [i for i in range(len(ports)) if i != source] if whole else [frame[5]]:
                took = len(frame) * per_byte
                down[to] = max(down[to], when - took) + took
                order += 1
                push(events, (down[to] + latency, order, None, to, frame))


def urgent() -> None:
    """Be woken in time: before ordinary processes, and without slack. A machine that forbids it is less exact."""
    ctypes.CDLL(None).prctl(FINE_TIMERS, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
