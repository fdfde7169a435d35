"""Stands for vLLM's server: `python vllm_double.py MODE ... --port PORT`, with a child in its process group."""

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

mode, port = sys.argv[1], int(sys.argv[sys.argv.index("--port") + 1])
hits, known = 0, set()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        text = f'# HELP x\nvllm:prefix_cache_hits_total{{engine="0"}} {hits:.1f}\n' if self.path == "/metrics" else ""
        self.answer(text)

    def do_POST(self):
        global hits
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/reset_prefix_cache":
            known.clear()
            return self.answer("")
        asked = json.loads(body)
        prompt = tuple(asked["prompt"])
        hits += len(prompt) if prompt in known else 0
        known.add(prompt)
        assert (asked["temperature"], asked["ignore_eos"]) == (1.0, True)
        drawn = asked["max_tokens"] - (mode == "short")
        self.answer(json.dumps({"usage": {"completion_tokens": drawn}}), 400 if mode == "refuses" else 200)

    def answer(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


if mode == "fails":
    sys.exit(3)
if mode == "hangs":
    time.sleep(60)
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
