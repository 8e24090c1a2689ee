"""Ranks are divided into parameter servers, data servers and workers, in this order, without a gap."""

import pytest

from hpcdl.errors import UsageError
from hpcdl.parameter_server.roles import divide


@pytest.mark.parametrize("size, servers, data_servers", [(1, 0, 0), (5, 2, 1), (4, 3, 0), (7, 0, 6)])
def test_the_roles_cover_all_ranks(size, servers, data_servers):
    roles = divide(size, servers, data_servers)
    assert [*roles.servers, *roles.data_servers, *roles.workers] == list(range(size))
    assert list(map(len, roles)) == [servers, data_servers, size - servers - data_servers]


@pytest.mark.parametrize(
    "size, servers, data_servers, words",
    [
        (4, 4, 0, "no worker is left over: 4 parameter servers of 4 ranks; start at least 5 ranks"),
        (3, 2, 1, "2 parameter servers and 1 data server of 3 ranks"),
        (2, 0, 5, "5 data servers of 2"),
        (4, -1, 0, "--servers must not be negative"),
        (4, 0, -2, "--data-servers must not be negative"),
    ],
)
def test_without_a_worker_it_is_refused(size, servers, data_servers, words):
    with pytest.raises(UsageError, match=words):
        divide(size, servers, data_servers)
