"""Starts a server, asks it by OpenAI's client from eight threads at once, reads its metrics, and stops it.

python examples/server_and_client.py [MODEL]      (needs quire-llm[server] and openai)
"""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

if "--help" in sys.argv:
    print(__doc__)
    sys.exit()
MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct.Q4_1.gguf"
COUNTRIES = ["France", "Italy", "Japan", "Egypt", "Spain", "Germany", "Norway", "Peru"]

with socket.socket() as probe:  # a port that is free now
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
url = f"http://127.0.0.1:{port}"
knobs = ["--served-model-name", "smollm2", "--max-num-seqs", "8", "--max-model-len", "512"]
server = subprocess.Popen([sys.executable, "-m", "quire", "serve", MODEL, "--port", str(port), *knobs])


def ready() -> bool:
    """Whether the server has compiled its programs and takes requests."""
    try:
        return urllib.request.urlopen(f"{url}/readyz", timeout=5).status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def ask(country: str) -> str:
    """One chat; the server batches those that are there at the same time."""
    messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
    chat = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=16, temperature=0)
    return chat.choices[0].message.content


try:
    while not ready():
        if server.poll() is not None:
            sys.exit(f"the server ended with code {server.returncode}")
        time.sleep(0.2)
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    with ThreadPoolExecutor(len(COUNTRIES)) as threads:
        for country, answer in zip(COUNTRIES, threads.map(ask, COUNTRIES), strict=True):
            print(f"{country}: {answer}")
    metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    print(*(line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total")), sep="\n")
finally:
    server.terminate()  # running streams would finish first
    server.wait()
