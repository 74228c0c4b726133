"""The control plane: the state machine of a job, the gRPC service and its client, their messages and credentials."""
