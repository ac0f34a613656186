"""Name the clusters of a run by a vision model of yours, through a running `ssl_kd explore`.

python scripts/name_clusters.py --url 'http://127.0.0.1:8090/?token=...' \
    --model_url http://localhost:11434/v1 --model llava

The model's server speaks OpenAI's chat API (Ollama, vLLM, llama.cpp, ...) and gets up to 8 typical
pictures of each cluster; an API key is read from the environment variable MODEL_API_KEY. Clusters
that have a name or that a person checked are left alone. Each name can be undone.
"""

import argparse
import base64
import json
import os
import sys
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

LONGEST = 60  # characters of a name
QUESTION = (
    "These pictures are typical of one group. Answer with a name for the group, one to four words "
    "that say what the pictures share, and nothing else."
)


class NoRedirect(HTTPRedirectHandler):
    """Follow no redirect, which would send the key to another server."""

    def redirect_request(self, *_):
        """Return no request."""


def send(opener, url, headers, content=None):
    """Return the body of the answer to a GET, or to a POST of `content` as JSON."""
    data = None if content is None else json.dumps(content).encode()
    request = Request(url, data, {"Content-Type": "application/json"} | headers)
    try:
        with opener.open(request, timeout=300) as answer:
            return answer.read()
    except HTTPError as error:
        sys.exit(f"error: {url}: {error.code} {error.read(300).decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"error: {url} cannot be reached: {getattr(error, 'reason', error)}")


def name_from(answer, taken):
    """Return the model's answer as a name of one line that no other cluster has."""
    try:
        text = json.loads(answer)["choices"][0]["message"]["content"].strip()
    except (ValueError, LookupError, TypeError, AttributeError):
        sys.exit(f"error: the model's server answered {answer[:200]!r}; expected a chat completion")
    line = "".join(c for c in text.partition("\n")[0] if c.isprintable())
    name = line.strip(" .\"'*`")[:LONGEST].strip() or "unnamed"
    unique, number = name, 2
    while unique.casefold() in taken:
        unique, number = f"{name} {number}", number + 1
    return unique


def main():
    """Name the clusters one after the other."""
    parser = argparse.ArgumentParser(description="Name clusters by a vision model of yours.")
    parser.add_argument("--url", required=True, help="the address that ssl_kd explore printed")
    parser.add_argument("--model_url", required=True, help="such as http://localhost:11434/v1")
    parser.add_argument("--model", required=True, help="name of the model on that server")
    flags = parser.parse_args()
    address, key = urlsplit(flags.url), os.environ.get("MODEL_API_KEY")
    token = {"X-Token": parse_qs(address.query).get("token", [""])[0]}
    api, local = f"http://{address.netloc}/api", build_opener(ProxyHandler({}))
    chat, model = f"{flags.model_url.rstrip('/')}/chat/completions", build_opener(NoRedirect())
    model_headers = {"Authorization": f"Bearer {key}"} if key else {}

    clusters = json.loads(send(local, f"{api}/clusters", token))
    taken = {cluster["name"].casefold() for cluster in clusters}
    for cluster in clusters:
        if cluster["name"] or cluster["checked"]:
            continue
        pictures = []
        for row in cluster["typical"]:
            picture = base64.b64encode(send(local, f"{api}/image/{row}", token)).decode()
            url = f"data:image/jpeg;base64,{picture}"
            pictures.append({"type": "image_url", "image_url": {"url": url}})
        parts = [{"type": "text", "text": QUESTION}, *pictures]
        question = {"model": flags.model, "messages": [{"role": "user", "content": parts}]}
        name = name_from(send(model, chat, model_headers, question), taken)
        decision = {"do": "rename", "cluster": cluster["cluster"], "name": name, "by": flags.model}
        send(local, f"{api}/curation", token, decision)
        taken.add(name.casefold())
        print(f"{cluster['cluster']}: {name}", flush=True)


if __name__ == "__main__":
    main()
