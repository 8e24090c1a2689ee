"""What a client knows of its servers, from the headers of their answers."""

from hpcdl.parameter_server.store_client import Connection


def test_a_header_that_arrives_before_its_values_changes_nothing():
    """Parameters are as old as what came with them says, not as what has come since."""
    connection = Connection(None, 0, slice(0, 3))
    connection.answer["seen"], connection.answer["version"], connection.answer["apart"] = 4, 5, 0.5
    connection.read()
    connection.answer["seen"], connection.answer["version"], connection.answer["apart"] = 6, 7, 0.75
    assert (connection.seen, connection.version, connection.apart_seconds) == (4, 5, 0.5)


def test_a_signal_is_not_forgotten():
    connection = Connection(None, 0, slice(0, 3))
    for signal, known in ((0, False), (1, True), (0, True)):
        connection.answer["signal"] = signal
        connection.read()
        assert connection.signalled is known
