"""Questions about a few long documents, several at once: how much of each was already cached?

    python examples/returning_prefix.py http://127.0.0.1:8000

Works against one server, replicas behind a router, or the Ray application, which also tells which
replica answered. One at a time would show nothing: an idle router may send all to one replica.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

DOCUMENTS, QUESTIONS = 4, 4


def document(number: int) -> str:
    return " ".join(f"Section {part} of document {number} is about stones." for part in range(60))


def ask(url: str, model: str, number: int, question: int) -> str:
    content = f"{document(number)}\n\nQuestion {question}: what is this document about?"
    body = {
        "model": model,  # routers need it
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 16,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        usage = json.load(answer)["usage"]
        replica = answer.headers.get("x-cairn-replica", "?")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    share = cached / usage["prompt_tokens"]
    return f"document {number}, question {question}: replica {replica}, {share:4.0%} cached"


def main() -> None:
    url = sys.argv[1].rstrip("/")
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    with ThreadPoolExecutor(DOCUMENTS) as pool:
        for question in range(QUESTIONS):
            asked = [pool.submit(ask, url, model, n, question) for n in range(DOCUMENTS)]
            for line in asked:
                print(line.result(), flush=True)


if __name__ == "__main__":
    main()
