"""A stand-in for tritonserver: answers health checks, holds a file in /dev/shm and a stub.

Behaviour comes from the environment: FAKE_LOG (lines to write), FAKE_EXIT (exit at once with that
status), FAKE_NOT_READY (never ready), FAKE_HANG (ignores SIGTERM).
"""

import http.server
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

options = dict(re.findall(r"--([a-z-]+)=(\S+)", " ".join(sys.argv[1:])))
prefix = re.search(r"shm-region-prefix-name=(\S+)", " ".join(sys.argv[1:])).group(1)
sys.stdout.write(os.environ.get("FAKE_LOG", "") + "\n")
sys.stdout.flush()
Path(f"/dev/shm/{prefix}region").write_bytes(b"x")
if "FAKE_EXIT" in os.environ:
    sys.exit(int(os.environ["FAKE_EXIT"]))

# A stub that outlives everything unless it is killed.
stub = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
model_file = f"{options['model-repository']}/tensorrt_llm/1/model.py"
subprocess.Popen([sys.executable, "-c", stub, model_file])


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # noqa: N802
        self.send_response(503 if "FAKE_NOT_READY" in os.environ else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


on_term = signal.SIG_IGN if "FAKE_HANG" in os.environ else lambda *_: os._exit(0)
signal.signal(signal.SIGTERM, on_term)
address = (options["http-address"], int(options["http-port"]))
http.server.ThreadingHTTPServer(address, Health).serve_forever()
