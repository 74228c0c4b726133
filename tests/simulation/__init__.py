"""A simulated job: the real rules, service, clients and agents, with a virtual clock, network, scripts and Slurm."""
