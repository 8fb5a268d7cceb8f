"""A stand-in for the Hugging Face hub: repositories in memory behind the part of its HTTP interface that is used."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def digest(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Repositories are dicts of files by name, in `server.repos`; datasets have names that begin with datasets/."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, content=b"", status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def absent(self, kind):
        self.answer({"error": f"{kind} not found"}, 404, X_Error_Code=kind)

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        self.server.seen.append((self.command, "/".join(parts)))
        if parts[0] == "api":
            return self.describe(parts[1:])
        if "resolve" not in parts:
            return self.absent("EntryNotFound")
        at = parts.index("resolve")
        repo, name = "/".join(parts[:at]), "/".join(parts[at + 2 :])
        if repo not in self.server.repos:
            return self.absent("RepoNotFound")
        if parts[at + 1] not in ("main", "v1", COMMIT):
            return self.absent("RevisionNotFound")
        content = self.server.repos[repo].get(name)
        if content is None:
            return self.absent("EntryNotFound")
        found = {"X_Repo_Commit": COMMIT, "ETag": f'"{digest(content)}"', "Content_Type": "application/octet-stream"}
        return self.answer(content, **found)

    def describe(self, parts):
        """GET /api/models/OWNER/NAME/{revision,tree}/..."""
        kind, owner, name, *rest = parts
        repo = f"{owner}/{name}" if kind == "models" else f"{kind}/{owner}/{name}"
        files = self.server.repos.get(repo)
        if files is None:
            return self.absent("RepoNotFound")
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            listed = [
                {"type": "file", "path": path, "size": len(content), "oid": digest(content)}
                for path, content in files.items()
                if path.startswith(below)
            ]
            return self.answer(listed)
        return self.answer(
            {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
        )

    def do_POST(self):
        path, body = urlsplit(self.path).path, self.body()
        self.server.seen.append(("POST", path.strip("/")))
        self.server.tokens.add(self.headers.get("Authorization"))
        if path == "/api/repos/create":
            given = json.loads(body)
            repo = f"{given['organization']}/{given['name']}"
            self.server.created[repo] = given
            self.server.repos.setdefault(repo, {})
            return self.answer({"url": f"{self.server.url}/{repo}", "name": repo})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        repo = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            wanted = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in wanted]
            return self.answer({"files": modes})
        if "/commit/" in path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    self.server.repos[repo][value["path"]] = base64.b64decode(value["content"])
            url = f"{self.server.url}/{repo}/commit/{COMMIT}"
            return self.answer({"commitUrl": url, "commitOid": COMMIT, "success": True})
        return self.absent("EntryNotFound")


@contextmanager
def hub(repos=None):
    """The server, with `url`, `repos`, `seen` (requests), `created` (what was asked) and `tokens`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.repos, server.seen, server.created, server.tokens = dict(repos or {}), [], {}, set()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
