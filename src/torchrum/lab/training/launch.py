"""The environment variables that launchers of several processes set, checked before anyone believes them."""

import os

from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError

COUNTS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "SLURM_NTASKS", "SLURM_PROCID")
INTERACTIVE = ("bash", "interactive")
"""Names of SLURM jobs in which a person types the commands: there the variables say nothing about processes."""


def check_launch(config: TrainConfig) -> int:
    """Refuse variables that contradict each other or the config, as a shell keeps them from another program.

    Returns:
        The processes that a launcher has started; 1 without one.
    """
    found = {name: _count(name) for name in COUNTS if name in os.environ}
    asked = config.devices * config.nodes
    rank, size = found.get("LOCAL_RANK", 0), found.get("WORLD_SIZE", 0)
    if rank and rank >= size:
        known = f"WORLD_SIZE is {size}" if size else "WORLD_SIZE is not set"
        raise ConfigError(f"LOCAL_RANK is {rank}, but {known}; unset LOCAL_RANK, or start the processes with torchrun.")
    if size > 1 and size != asked:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but devices * nodes is {asked}; pass --devices and --nodes to match, or unset it."
        )
    tasks = found.get("SLURM_NTASKS", 1)
    by_slurm = tasks > 1 and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE
    if by_slurm:
        if tasks != asked:
            advice = "pass --devices and --nodes to match, or unset it"
            raise ConfigError(f"SLURM_NTASKS is {tasks}, but devices * nodes is {asked}; {advice}.")
        if "SLURM_PROCID" not in found:
            raise ConfigError(f"SLURM_NTASKS is {tasks}, but SLURM_PROCID is not set; start the processes with srun.")
    # MASTER_ADDR: each machine's process was started by hand. Without any of them it would wait for the others for ever
    if config.nodes > 1 and not (size > 1 or by_slurm or "MASTER_ADDR" in os.environ):
        raise ConfigError(
            f"nodes is {config.nodes}, but nothing has started processes on other machines; start them with srun or "
            "torchrun, or pass --nodes 1."
        )
    return max(size, 1)


def _count(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal() or (name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS") and int(text) < 1):
        raise ConfigError(f"{name} is {text!r}, which is not a number of processes; unset it, or start with torchrun.")
    return int(text)
