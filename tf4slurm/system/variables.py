"""The environment variables that tf4slurm sets for its agents and for the processes that agents start."""

CONTROL_VARIABLE = "TF4SLURM_CONTROL"  # addresses of the control service, "host:port", separated by commas
TOKEN_VARIABLE = "TF4SLURM_TOKEN"  # noqa: S105 - the job's token, for each call
CERTIFICATE_VARIABLE = "TF4SLURM_CERTIFICATE"  # of the control service
SETTINGS_VARIABLE = "TF4SLURM_SETTINGS"  # the job's settings for an agent, as JSON
ANSWER_VARIABLE = "TF4SLURM_ANSWER"  # file to which a launcher that `api` started writes its run directory
RUN_NAME_VARIABLE = "TF4SLURM_RUN_NAME"  # name of the run directory of an element of a local sweep
RANK_VARIABLE = "TF4SLURM_RANK"  # of a local agent
TASK_VARIABLE = "TF4SLURM_TASK"  # the script's task, such as "worker/0"
ATTEMPT_VARIABLE = "TF4SLURM_ATTEMPT"  # number of the attempt, from 1
RUN_DIRECTORY_VARIABLE = "TF4SLURM_RUN_DIRECTORY"  # path
SCRIPT_CHANNEL_VARIABLE = "TF4SLURM_SCRIPT_CHANNEL"  # a socket: a path, or "@" and a name in the abstract namespace
SERVICES_VARIABLE = "TF4SLURM_SERVICES"  # of the tf.data service: {"data-dispatcher": ["10.1.0.4:40123"], …}

AGENT_VARIABLES = (CONTROL_VARIABLE, TOKEN_VARIABLE, CERTIFICATE_VARIABLE, SETTINGS_VARIABLE, RANK_VARIABLE)
"""Variables that a launcher sets for its agents. Agents do not pass them on to their child processes."""

SCRIPT_VARIABLES = (
    "TF_CONFIG",
    *(TASK_VARIABLE, ATTEMPT_VARIABLE, RUN_DIRECTORY_VARIABLE, SCRIPT_CHANNEL_VARIABLE, SERVICES_VARIABLE),
)
"""Variables that an agent sets for its child process, the user's script."""
