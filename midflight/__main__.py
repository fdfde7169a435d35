"""`python -m midflight`."""

from midflight.cli import main

main()
