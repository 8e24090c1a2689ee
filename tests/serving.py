"""Data servers for tests: some ranks serve, the others run what is tested; and the same data without servers."""

from hpcdl.comm import Communicator
from hpcdl.data import open_data
from hpcdl.data_server import batch_server
from hpcdl.data_server.batch_server import introduce, serve
from hpcdl.data_server.remote_data import RemoteData


def served(comm, servers, path, body, timeout=0, **options):
    """The first ranks serve; the others run body(data, number, workers, everyone), and return what it returns.
    A server returns its status, the bytes it has sent, and the bytes of the description."""
    everyone, workers = Communicator(comm, timeout=timeout, trace=1000), comm.size - servers
    serves = comm.rank < servers
    part = comm.Split(int(serves), comm.rank)
    if serves:
        numbers = list(range(comm.rank, workers, servers))
        parts = (numbers, workers) if options.get("placement") == "partitioned" else None
        opened = open_data(path, comm=part, parts=parts, **options)
        clients = [servers + number for number in numbers]
        introduce(everyone, opened, clients)
        status = serve(everyone, opened, clients)
        result = status, everyone.traffic["push"].bytes, len(batch_server.describe(opened))
        opened.close()
    else:
        number = comm.rank - servers
        data = RemoteData(everyone, number % servers)
        result = body(data, number, workers, everyone)
        data.close()
    part.Free()
    everyone.free()
    return result


def alone(path, number, workers, **options):
    """The data as this worker has it without servers."""
    return open_data(path, parts=([number], workers), **options)
