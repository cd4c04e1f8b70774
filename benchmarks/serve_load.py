"""Load examples/serve_http.py on the loopback address, with many sessions at a time that ask for 20 characters each.

pip install "torchrum[train,serve]"
python benchmarks/serve_load.py --json results/bench/serve_load.json
"""

import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recording import markdown, run

SERVER = Path(__file__).parents[1] / "examples" / "serve_http.py"
SESSIONS, REQUESTS, LENGTH = (1, 4, 16, 64), 25, 20


def post(connection: http.client.HTTPConnection, path: str, body: str = "") -> dict[str, str]:
    connection.request("POST", path, body)
    answer = connection.getresponse()
    content = answer.read()
    if answer.status >= 300:
        raise RuntimeError(f"{path}: {answer.status} {content!r}")
    return json.loads(content)


def use(port: int) -> list[float]:
    """Seconds of each request of one session."""
    connection, times = http.client.HTTPConnection("127.0.0.1", port, timeout=60), []
    path = f"/sessions/{post(connection, '/sessions')['session']}"
    for _ in range(REQUESTS):
        start = time.perf_counter()
        post(connection, path, json.dumps({"text": "Alice ", "length": LENGTH}))
        times.append(time.perf_counter() - start)
    connection.close()
    return times


def load(sessions: int, port: int) -> dict[str, float]:
    begin = time.perf_counter()
    with ThreadPoolExecutor(sessions) as pool:
        times = [seconds for one in pool.map(use, [port] * sessions) for seconds in one]
    rate = len(times) / (time.perf_counter() - begin)
    last = statistics.quantiles(times, n=100)[98]
    return {"requests per second": rate, "median ms": 1e3 * statistics.median(times), "99th percentile ms": 1e3 * last}


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        if server.poll() is not None:
            raise SystemExit("the server has ended")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit("the server does not answer")


def measure() -> dict[str, dict[str, float]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(SERVER), "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(port, server)
        load(1, port)  # warm up
        return {str(sessions): load(sessions, port) for sessions in SESSIONS}
    finally:
        server.terminate()
        server.wait()


def table(measured: dict[str, dict[str, float]]) -> str:
    columns = next(iter(measured.values()))
    rows = [[sessions, *(f"{value:.1f}" for value in row.values())] for sessions, row in measured.items()]
    return markdown(["sessions", *columns], rows)


if __name__ == "__main__":
    run(__doc__, measure, table)
