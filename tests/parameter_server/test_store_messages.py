"""What travels between clients and servers of a store: numbers, in the same places for both."""

from hpcdl.parameter_server.store_messages import ENDED, NO_STEP, REQUEST, Push, StoreOperation, StoreTag


def test_a_push_is_read_as_it_was_told():
    numbers = {"clock": 7, "seen": 5, "version": 6, "start": 2, "stop": 9}
    amounts = {"count": 12.0, "total": 64.0, "loss": 0.5, "norm": 0.25}
    header = REQUEST.header(operation=StoreOperation.PUSH, **numbers, **amounts)
    assert REQUEST.vector(header).tolist() == [1, 0, 7, 0, 2, 9, 5, 6, 12, 64, 0.5, 0.25, *[0] * 4]
    push = Push.read(header, client=3)
    assert push == Push(3, slice(2, 9), 7, 5, 6, 12.0, 64.0, 0.5, 0.25)
    assert {type(each) for each in (push.clock, push.seen, push.version, push.part.start)} == {int}


def test_no_two_kinds_of_messages_share_a_tag():
    """The values of an answer have their header's tag + 1."""
    tags = [
        StoreTag.REQUEST,
        StoreTag.VALUES,
        StoreTag.BESIDE,
        *(StoreTag.COPY, StoreTag.COPIED, StoreTag.HELD, StoreTag.RECEIPT),
        *(StoreTag.RESIDUAL, StoreTag.RESIDUAL_VALUES),
        *(tag + i for tag in (StoreTag.ANSWER, StoreTag.GATHERED, StoreTag.UNASKED) for i in (0, 1)),
    ]
    assert len(set(tags)) == len(tags) and set(StoreTag) <= set(tags)
    assert len({ENDED, NO_STEP}) == 2 and max(ENDED, NO_STEP) < 0  # no step has that number
