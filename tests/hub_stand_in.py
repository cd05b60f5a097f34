"""A stand-in on loopback for the Hugging Face hub: the routes that ``huggingface_hub`` asks for files and commits."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RESOLVE = re.compile(r"/(?:datasets/)?(\w+/[\w.-]+)/resolve/([^/]+)/(.+)")
ABOUT = re.compile(r"/api/(?:models|datasets)/(\w+/[\w.-]+)(?:/(revision|tree|preupload|commit)/([^/?]+))?(?:\?.*)?")


class Repository:
    """Files of a repository at each of its commits; the last one is main."""

    def __init__(self, *commits: dict[str, bytes], is_gated: bool = False) -> None:
        self.commits = {hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest(): files for files in commits}
        self.is_gated = is_gated

    @property
    def main(self) -> str:
        return list(self.commits)[-1]


def repository(*folders: Path, **options) -> Repository:
    """One commit for each folder."""
    return Repository(
        *({str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
          for folder in folders),
        **options,
    )  # fmt: skip


class StandIn:
    """The hub.

    Attributes:
        repositories: repositories by ``owner/name``.
        asked: method, path, range and authorization of each request.
        cut: names of files that are cut in the middle, once.
        broken: names of files that are not returned.
        pushed: files that were uploaded, by repository.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str, str, str]] = []
        self.cut: set[str] = set()
        self.broken: set[str] = set()
        self.pushed: dict[str, dict[str, bytes]] = {}
        self.url = ""

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for."""
        found = (RESOLVE.fullmatch(path) for method, path, _, _ in self.asked if method == "GET")
        return [match[3] for match in found if match]

    @contextlib.contextmanager
    def running(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.answer(is_head=False)

            def do_HEAD(self):
                self.answer(is_head=True)

            def do_POST(self):
                self.note()
                length = int(self.headers.get("Content-Length") or 0)
                content = self.rfile.read(length) if length else self.chunks()
                about = ABOUT.fullmatch(self.path)
                if about and about[2] == "preupload":
                    files = [{**file, "uploadMode": "regular", "shouldIgnore": False}
                             for file in json.loads(content)["files"]]  # fmt: skip
                    self.reply({"files": files})
                elif about and about[2] == "commit":
                    for line in map(json.loads, content.decode().splitlines()):
                        if line["key"] == "file":
                            file = hub.pushed.setdefault(about[1], {})
                            file[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                    page = f"{hub.url}/{about[1]}/commit/{'1' * 40}"
                    self.reply({"success": True, "commitOid": "1" * 40, "commitUrl": page})
                elif self.path == "/api/repos/create":
                    asked = json.loads(content)
                    hub.pushed["created"] = asked
                    self.reply({"url": f"{hub.url}/{asked.get('organization', 'someone')}/{asked['name']}"})
                else:
                    self.reply({"errors": [], "warnings": []})

            def chunks(self):
                found = b""
                while self.headers.get("Transfer-Encoding") == "chunked":
                    size = int(self.rfile.readline(), 16)
                    found += self.rfile.read(size)
                    self.rfile.readline()
                    if not size:
                        break
                return found

            def note(self):
                headers = self.headers
                told = (headers.get("Range") or "", headers.get("Authorization") or "")
                hub.asked.append((self.command, self.path, *told))

            def reply(self, value, status=200, **headers):
                content = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for name, text in headers.items():
                    self.send_header(name.replace("_", "-"), text)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def refuse(self, code):
                self.reply({"error": code}, 403 if code == "GatedRepo" else 404, X_Error_Code=code)

            def answer(self, *, is_head):
                self.note()
                about = ABOUT.fullmatch(self.path)
                file = RESOLVE.fullmatch(self.path)
                found = about or file
                repository = hub.repositories.get(found[1]) if found else None
                if repository is None:
                    self.refuse("RepoNotFound")
                    return
                asked = file[2] if file else about[3]
                commit = repository.main if asked in (None, "main") else asked
                if commit not in repository.commits:
                    self.refuse("RevisionNotFound")
                    return
                files = repository.commits[commit]
                if about and about[2] == "tree":
                    self.reply([{"type": "file", "path": name, "size": len(data), "oid": name_of(data)}
                                for name, data in files.items()])  # fmt: skip
                elif about:
                    siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                    self.reply({"id": about[1], "sha": commit, "siblings": siblings, "private": False})
                elif repository.is_gated:
                    self.refuse("GatedRepo")
                else:
                    self.send_file(file[3], files[file[3]], commit, is_head=is_head)

            def send_file(self, name, content, commit, *, is_head):
                if name in hub.broken and not is_head:
                    self.reply({"error": "broken"}, 500)
                    return
                start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
                for header, text in (("ETag", f'"{name_of(content)}"'), ("X-Repo-Commit", commit)):
                    self.send_header(header, text)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                if is_head:
                    return
                if name in hub.cut:
                    hub.cut.remove(name)
                    self.wfile.write(content[: len(content) // 2])
                    self.close_connection = True
                    return
                self.wfile.write(content[start:])

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def name_of(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
