"""What travels between clients and servers of a store: numbers, in the same places for both."""

import numpy as np

from hpcdl.comm.counting import Counters
from hpcdl.comm.trace import Traffic
from hpcdl.parameter_server.store_messages import (
    ANSWER_HEADER,
    ENDED,
    NO_STEP,
    REQUEST_HEADER,
    Push,
    StoreOperation,
    StoreTag,
    as_message,
    as_request,
    new_header,
    tell_sent,
)


def test_a_header_is_its_numbers_in_order():
    """16 numbers ask, 9 answer; what is not said is 0, what is changed later changes the message."""
    request = new_header(REQUEST_HEADER, operation=StoreOperation.PUSH, reply=StoreTag.ANSWER, signal=True, loss=np.inf)
    message = as_message(request)
    assert message.dtype == np.float64 and message.tolist() == [1, 3, *[0] * 8, np.inf, 0, 0, 1, 0, 0]
    request["seen"] = 2**53
    assert message[6] == 2**53 and as_request(message.copy()) == request
    assert as_message(new_header(ANSWER_HEADER)).tolist() == [0] * 9


def test_a_message_tells_what_its_sender_has_sent_with_it():
    traffic, header = Traffic(push=Counters(bytes=1000, messages=4)), new_header(ANSWER_HEADER)
    tell_sent(header, traffic)
    assert (header["bytes"], header["messages"]) == (1072, 5)
    tell_sent(header, traffic, np.zeros(3))
    assert (header["bytes"], header["messages"]) == (1096, 6)
    traffic["all_reduce"].messages = None  # a library's own hides them
    tell_sent(header, traffic)
    assert header["bytes"] == 1072 and np.isnan(header["messages"])


def test_a_push_is_read_as_it_was_told():
    numbers = {"clock": 7, "seen": 5, "version": 6, "start": 2, "stop": 9}
    amounts = {"count": 12.0, "total": 64.0, "loss": 0.5, "norm": 0.25}
    push = Push.read(new_header(REQUEST_HEADER, operation=StoreOperation.PUSH, **numbers, **amounts), client=3)
    assert push == Push(3, slice(2, 9), 7, 5, 6, 12.0, 64.0, 0.5, 0.25)
    assert {type(each) for each in (push.clock, push.seen, push.version, push.part.start)} == {int}


def test_no_two_kinds_of_messages_share_a_tag():
    """The values of an answer have their header's tag + 1."""
    tags = [
        StoreTag.REQUEST,
        StoreTag.VALUES,
        StoreTag.BESIDE,
        *(StoreTag.COPY, StoreTag.COPIED, StoreTag.HELD, StoreTag.RECEIPT),
        *(tag + i for tag in (StoreTag.ANSWER, StoreTag.GATHERED, StoreTag.UNASKED) for i in (0, 1)),
    ]
    assert len(set(tags)) == len(tags) and set(StoreTag) <= set(tags)
    assert len({ENDED, NO_STEP}) == 2 and max(ENDED, NO_STEP) < 0  # no step has that number
