"""hpcdl: train models with every distributed-learning strategy, on any machine that has MPI.

The rooms, from the top; a room imports from rooms below it, never upwards or from beside:

    scripts                          one program per strategy or tool
    strategies                       one file per strategy: the loop is the algorithm
    federated, parallel              clients of federated learning; what a rank holds of a model that is cut
    services                         what dedicated ranks offer: parameters, training data
    runs                             one training run
    models, optim, data, machine     gradients, update rules, examples, what this machine is
    comm                             messages
    kernels                          the loops

Beneath all rooms lie small modules that know of none: chunks, errors, files, memory, random, shared_memory.
"""

__version__ = "0.1.0"
