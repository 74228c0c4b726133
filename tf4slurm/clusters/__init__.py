"""Clusters for notebooks: ps and workers whose chief is the process that starts them."""
