"""The control plane: messages <- auth, verdict <- state <- service, client."""
