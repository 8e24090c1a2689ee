from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcdl(PythonPackage):
    """Train models with every distributed-learning strategy, on any machine that has MPI."""

    url = "file:///hpcdl-0.1.0.tar.gz"  # there is no public archive yet: `make dist` writes it
    manual_download = True

    license("BSD-3-Clause")

    version("0.1.0")

    variant("report", default=True, description="Pictures of runs")
    variant("torch", default=False, description="PyTorch's modules as models")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:3.14")
        depends_on("py-setuptools@77:", type="build")
        depends_on("py-numpy@1.26:")
        depends_on("py-numba@0.61:0.68")
        depends_on("py-mpi4py@4.0:")
        depends_on("py-h5py@3.11:")
        depends_on("duckdb@1.3: +python")
        depends_on("py-threadpoolctl@3.5:")
        depends_on("py-rich@13.7:")
        depends_on("py-platformdirs@4.2:")
        depends_on("py-pyyaml@6.0:")
        depends_on("py-networkx@3.2:")
        depends_on("py-matplotlib@3.8:", when="+report")
        depends_on("py-torch@2.3:", when="+torch")
