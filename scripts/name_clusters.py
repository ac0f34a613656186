"""Name the clusters of a run by a vision model of yours, through a running `ssl_kd explore`.

python scripts/name_clusters.py --url 'http://127.0.0.1:8090/?token=...' \
    --model_url http://localhost:11434/v1 --model llava

The model's server speaks OpenAI's chat API (Ollama, vLLM, llama.cpp, ...) and gets up to 8 typical
pictures of each cluster; an API key is read from the environment variable MODEL_API_KEY. Clusters
that have a name or that a person checked are left alone. Each name can be undone. On a machine that
others use, set EXPLORE_URL instead of --url: `ps` shows flags, and so the token.
"""

import argparse
import base64
import json
import os
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import parse_qs, urlsplit

QUESTION = (
    "These pictures are typical of one group. Answer with a name for the group, one to four words "
    "that say what the pictures share, and nothing else."
)


def send(url, headers, content=None):
    """Return the body of the answer to a GET, or to a POST of `content`; follow no redirect."""
    address, body = urlsplit(url), None if content is None else json.dumps(content)
    connect = HTTPSConnection if address.scheme == "https" else HTTPConnection
    try:
        connection = connect(address.netloc, timeout=300)
        connection.request("POST" if body else "GET", address.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, HTTPException) as error:
        sys.exit(f"error: {url} cannot be reached: {error}")
    if answer.status != 200:
        sys.exit(f"error: {url}: {answer.status} {content[:300]!r}")
    return content


def name_from(answer, taken):
    """Return the model's answer as a name of one line that no other cluster has."""
    try:
        text = json.loads(answer)["choices"][0]["message"]["content"].strip()
    except (ValueError, LookupError, TypeError, AttributeError):
        sys.exit(f"error: the model's server answered {answer[:200]!r}; expected a chat completion")
    line = "".join(c for c in text.partition("\n")[0] if c.isprintable())
    unique = name = line.strip(" .\"'*`")[:60].strip() or "unnamed"
    number = 1
    while unique.casefold() in taken:
        number += 1
        unique = f"{name} {number}"
    return unique


def main():
    """Name the clusters one after the other."""
    parser = argparse.ArgumentParser(description="Name clusters by a vision model of yours.")
    about = "the address that ssl_kd explore printed; default: the variable EXPLORE_URL"
    address = os.environ.get("EXPLORE_URL")
    parser.add_argument("--url", default=address, required=not address, help=about)
    parser.add_argument("--model_url", required=True, help="such as http://localhost:11434/v1")
    parser.add_argument("--model", required=True, help="name of the model on that server")
    flags = parser.parse_args()
    page, chat = urlsplit(flags.url), f"{flags.model_url.rstrip('/')}/chat/completions"
    api, token = f"{page.scheme}://{page.netloc}/api", parse_qs(page.query).get("token", [""])[0]
    of_page, of_model = {"X-Token": token}, {"Content-Type": "application/json"}
    if key := os.environ.get("MODEL_API_KEY"):
        of_model["Authorization"] = f"Bearer {key}"

    clusters = json.loads(send(f"{api}/clusters", of_page))
    taken = {cluster["name"].casefold() for cluster in clusters}
    for cluster in clusters:
        if cluster["name"] or cluster["checked"]:
            continue
        parts: list = [{"type": "text", "text": QUESTION}]
        for row in cluster["typical"]:
            picture = base64.b64encode(send(f"{api}/image/{row}", of_page)).decode()
            url = f"data:image/jpeg;base64,{picture}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        question = {"model": flags.model, "messages": [{"role": "user", "content": parts}]}
        name = name_from(send(chat, of_model, question), taken)
        decision = {"do": "rename", "cluster": cluster["cluster"], "name": name, "by": flags.model}
        send(f"{api}/curation", of_page, decision)
        taken.add(name.casefold())
        print(f"{cluster['cluster']}: {name}", flush=True)


if __name__ == "__main__":
    main()
