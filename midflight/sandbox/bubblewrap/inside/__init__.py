"""What runs inside bubblewrap: the zygote, the holder of a session, the program. Standard library only.

This folder is bound into the sandbox by itself, as the package `inside`; so its modules import each other relatively
and nothing else of Midflight. None of it is imported by the agent's process but `frames`.
"""
