"""`mcp_slow.py BEGAN GO SERVER`: the server, which from its second start on waits until there is a file `GO`."""

import runpy
import sys
import time
from pathlib import Path

began, go, server = map(Path, sys.argv[1:])
with began.open("a") as file:
    file.write("x")
while began.read_text() != "x" and not go.exists():
    time.sleep(0.05)
sys.argv = [str(server)]
runpy.run_path(str(server), run_name="__main__")
