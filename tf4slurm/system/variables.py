"""The environment variables that tf4slurm sets for its agents and for the processes that agents start."""

from __future__ import annotations

CONTROL_VARIABLE = "TF4SLURM_CONTROL"
"""Addresses of the control service, "host:port", separated by commas."""

TOKEN_VARIABLE = "TF4SLURM_TOKEN"  # noqa: S105
CERTIFICATE_VARIABLE = "TF4SLURM_CERTIFICATE"
"""The job's credentials: the token for each call, and the certificate of the control service."""

SETTINGS_VARIABLE = "TF4SLURM_SETTINGS"
"""The job's settings for an agent, as JSON."""

RANK_VARIABLE = "TF4SLURM_RANK"
"""Rank of a local agent."""

TASK_VARIABLE = "TF4SLURM_TASK"
"""The script's task, such as "worker/0"."""

ATTEMPT_VARIABLE = "TF4SLURM_ATTEMPT"
"""Number of the attempt, from 1."""

RUN_DIRECTORY_VARIABLE = "TF4SLURM_RUN_DIRECTORY"
"""Path of the job's run directory."""

SCRIPT_CHANNEL_VARIABLE = "TF4SLURM_SCRIPT_CHANNEL"
"""The script channel's socket: a path, or "@" and a name in Linux's abstract namespace."""

SERVICES_VARIABLE = "TF4SLURM_SERVICES"
"""Servers outside the cluster spec, as JSON: {"data-dispatcher": ["10.1.0.4:40123"], …}."""

AGENT_VARIABLES = (CONTROL_VARIABLE, TOKEN_VARIABLE, CERTIFICATE_VARIABLE, SETTINGS_VARIABLE, RANK_VARIABLE)
"""Variables that a launcher sets for its agents; agents remove them from the environment of children."""

SCRIPT_VARIABLES = (
    "TF_CONFIG",
    *(TASK_VARIABLE, ATTEMPT_VARIABLE, RUN_DIRECTORY_VARIABLE, SCRIPT_CHANNEL_VARIABLE, SERVICES_VARIABLE),
)
"""Variables that an agent sets for its child process."""
