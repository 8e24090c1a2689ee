"""Blocking and asynchronous calls of a communicator."""

import pytest


@pytest.fixture(params=["", "i"])
def call(request):
    """A function: call(comm, name, ...) is comm.name(...), or its asynchronous form, which is waited for."""

    def made(comm, name, *arguments):
        found = getattr(comm, request.param + name)(*arguments)
        return found.wait() if request.param else found

    return made
