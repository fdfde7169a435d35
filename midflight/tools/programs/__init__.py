"""Programs and files of a trajectory, in the sandbox."""
