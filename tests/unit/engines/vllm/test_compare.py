"""``examples/vllm/compare.py`` tells equal answers from different ones."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "examples" / "vllm" / "compare.py"


@contextmanager
def server(tokens: Sequence[int]) -> Iterator[str]:
    """Streams these tokens, whatever it is asked."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for token in tokens:
                self.wfile.write(f"data: {json.dumps({'choices': [{'token_ids': [token]}]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}"
        finally:
            made.shutdown()
            thread.join()


@pytest.mark.parametrize(("alone", "equal"), [([3, 4, 5], True), ([3, 4, 6], False), ([3, 4], False)])
def test_an_answer_with_another_token_or_without_one_is_told(alone: Sequence[int], equal: bool) -> None:
    with ExitStack() as stack:
        router, decode = (stack.enter_context(server(tokens)) for tokens in ([3, 4, 5], alone))
        command = [sys.executable, str(SCRIPT), "m", "--router", router, "--decode", decode, "--lengths", "4"]
        found = subprocess.run([*command, "--rounds", "2"], capture_output=True, text=True, timeout=60)
    said = json.loads(found.stdout)
    assert (found.returncode, found.stderr) == (0 if equal else 1, "")
    assert [row["equal"] for row in said["one_by_one"]] == [equal] * 2
    assert said["at_once"] == {"requests": 2, "equal": 2 * equal}
