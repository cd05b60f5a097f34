"""``crius chat --web``: who may ask, one answer at a time, how it ends, and the script of the page."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest
from browser import CUT, FAINT, WIDER, needs_chromium, opened
from chat_samples import save_talker

from crius import cli
from crius.errors import DataError
from crius.kernels import choice
from crius.tools.generate import web
from crius.tools.generate.chat import Stopped, Turn
from crius.tools.generate.settings import Settings
from crius.untrusted import SMALL

PAGE = web._PAGE.read_text()
HOSTILE = '</script><img src=x onerror="alert(1)">&lt;b&gt;\x1b[2J\u2028.'
ASKED = {"model": 0, "messages": [{"role": "user", "content": "Hello"}]}


class Talker:
    """Stands for a ``Chat``: answers with these pieces, and waits where a piece is None."""

    name = "run <b>one</b>"

    def __init__(self, *pieces):
        self.pieces = pieces
        self.goes_on = threading.Event()
        self.has_stopped = False

    def answer(self, messages, settings, on_text):
        if messages[-1]["content"] == "too long":
            raise DataError("the question is too long.", fix="a shorter question")
        try:
            for piece in self.pieces:
                if piece is None:
                    while not self.goes_on.wait(0.01):
                        on_text("")
                else:
                    on_text(piece)
        except Stopped:
            self.has_stopped = True
        numbers = {"num_tokens": 3, "num_read": 2, "num_kept": 1, "num_left": 0}
        return Turn(text="", finish_reason="stopped" if self.has_stopped else "eos", **numbers)


@pytest.fixture
def serve():
    """Starts a server for talkers; it is closed in the end."""
    running = []

    def start(*talkers):
        server = web.Server(talkers, Settings(chat=True))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        for talker in server.chats:
            talker.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class Answer:
    """Status, headers and text of an answer to a request."""

    def __init__(self, server, method="POST", path="{token}/ask", body=ASKED, **headers):
        self._connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        body = json.dumps(body) if isinstance(body, dict) else body
        self._connection.request(method, "/" + path.format(token=server.token), body, headers)
        self.response = self._connection.getresponse()
        self.status = self.response.status

    @property
    def lines(self):
        return [json.loads(line) for line in self.response.read().splitlines()]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "request_",
    [
        {"path": ""},
        {"path": "ask"},
        {"path": "{token}"},
        {"path": "x{token}/ask"},
        {"path": "{token}x/ask"},
        {"path": "%c3%a9/ask"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "localhost"},
    ],
    ids=str,
)
def test_another_address_origin_or_host_is_refused(serve, request_, method):
    talker = Talker("secret")
    server = serve(talker)
    answer = Answer(server, method, **request_)
    assert answer.status == 403 and answer.lines == [{"error": "this is not the address that crius chat printed."}]


def test_an_address_has_a_token_that_nobody_guesses_and_only_this_machine_reaches_it(serve):
    one = serve(Talker())
    two = serve(Talker())
    assert one.token != two.token and len(one.token) >= 32
    assert one.server_address[0] == "127.0.0.1" and one.server_port != two.server_port


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 400),
        ("[" * 9999, 400),
        ("[]", 400),
        ({"model": 0}, 400),
        ({"model": 9, "messages": ASKED["messages"]}, 400),
        ({"model": 0, "messages": []}, 400),
        ({"model": 0, "messages": [{"role": "user"}]}, 400),
        ({"model": 0, "messages": [{"role": "user", "content": "\ud800"}]}, 400),
        ("x" * (SMALL + 1), 413),
        ("", 413),
    ],
    ids=range(10),
)
def test_what_is_no_conversation_is_refused(serve, body, status):
    assert Answer(serve(Talker()), body=body).status == status


def test_there_are_no_other_pages(serve):
    server = serve(Talker())
    for method, path in (("GET", "{token}/ask"), ("GET", "{token}/../../etc/passwd"), ("POST", "{token}/")):
        assert Answer(server, method, path).status == 404


def test_an_answer_comes_in_pieces_and_an_error_is_a_line(serve):
    server = serve(Talker("a", "\u2028b", None))
    answer = Answer(server, Origin=server.origin)
    assert answer.status == 200 and answer.response.getheader("Transfer-Encoding") == "chunked"
    assert json.loads(answer.response.readline()) == {"text": "a"}
    server.chats[0].goes_on.set()
    assert answer.lines == [
        {"text": "\u2028b"},
        {"told": "(3 tokens, ended by eos; 2 tokens read, 1 kept)\n", "left": 0},
    ]
    [error] = Answer(server, body={"model": 0, "messages": [{"role": "user", "content": "too long"}]}).lines
    assert error["error"].startswith("DataError: the question is too long.")


def test_one_answer_is_written_at_a_time_and_stop_ends_it(serve):
    talker = Talker("a", None)
    server = serve(talker, Talker("b"))
    first = Answer(server)
    first.response.readline()
    second = Answer(server, body=ASKED | {"model": 1})
    assert second.status == 409 and "another answer is being written" in second.lines[0]["error"]
    assert Answer(server, path="{token}/stop", body="").status == 200
    [last] = first.lines
    assert "ended by stopped" in last["told"] and talker.has_stopped
    assert Answer(server, body=ASKED | {"model": 1}).lines[0] == {"text": "b"}


def test_a_browser_that_goes_away_ends_its_answer(serve):
    talker = Talker("a", *["b"] * 10**6)
    server = serve(talker)
    answer = Answer(server)
    answer.response.readline()
    answer.response.close()
    answer._connection.close()
    for _ in range(2000):
        if server.lock.acquire(timeout=0.01):
            break
    else:
        raise AssertionError("it is still being written")


def test_the_end_leaves_no_thread_and_no_port(serve):
    before = threading.active_count()
    talker = Talker("a", None)
    server = serve(talker)
    idle = socket.create_connection(server.server_address)  # as a browser opens one before it has a request
    Answer(server).response.readline()
    server.shutdown()
    server.server_close()
    assert talker.has_stopped and threading.active_count() <= before + 1  # the fixture's
    with pytest.raises(OSError):
        socket.create_connection(server.server_address, timeout=1)
    idle.close()


def test_the_page_loads_nothing_and_runs_only_its_own_script(serve):
    answer = Answer(serve(Talker()), "GET", "{token}/", None)
    page = answer.response.read().decode()
    policy = answer.response.getheader("Content-Security-Policy")
    [nonce] = set(re.findall(r'nonce="([\w-]+)"', page))
    for rule in ("default-src 'none'", f"script-src 'nonce-{nonce}'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert rule in policy.split("; ")
    assert "unsafe" not in policy and answer.response.getheader("Referrer-Policy") == "no-referrer"
    assert not re.findall(r"https?:|//|<script(?! nonce)|\son\w+=|style=|@import|url\(", page)
    assert 'data-names="[&quot;run &lt;b&gt;one&lt;/b&gt;&quot;]"' in page
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function\(|DOMParser", page)


def luminance(colour):
    digits = colour if len(colour) == 6 else "".join(digit * 2 for digit in colour)
    parts = [part / 255 for part in bytes.fromhex(digits)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_texts_have_contrast_in_both_schemes():
    schemes = [dict(re.findall(r"--(\w+): #(\w+);", line)) for line in PAGE.splitlines() if "--bg: " in line]
    assert len(schemes) == 2
    for colours in schemes:
        pairs = [(text, back) for text in ("text", "muted", "bad") for back in ("bg", "card")]
        for one, other in [*pairs, ("text", "asked"), ("on", "accent")]:
            dark, light = sorted((luminance(colours[one]), luminance(colours[other])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (one, other)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_a_hostile_answer_as_text(serve, width, scheme):
    server = serve(Talker("An answer of ", "long " * 200 + "words: ", HOSTILE), Talker(HOSTILE))
    origin = f"http://127.0.0.1:{server.server_port}/"
    with opened(f"{origin}{server.token}/", own=origin, scheme=scheme, width=width, offline=False) as page:
        page.fill("#question", f"Hello {HOSTILE}")
        page.click("#send")
        page.locator("#stop:disabled").wait_for()
        assert page.inner_text("main").count("<img src=x onerror=") == 4 and page.locator("img").count() == 0
        assert (page.evaluate(WIDER), page.evaluate(CUT), page.evaluate(FAINT)) == (0, [], [])


FAKE_DOM = """
const made = [];
class Fake {
  constructor(kind) { Object.assign(this, { kind, children: [], dataset: {}, heard: {}, value: "", disabled: false }); }
  append(child) { this.children.push(child); }
  replaceChildren() { this.children = []; }
  addEventListener(name, heard) { this.heard[name] = heard; }
  setAttribute() {}
  scrollIntoView() {}
  focus() {}
  set innerHTML(text) { throw new Error("HTML of a text"); }
}
const ids = {};
const part = (id) => (ids[id] ??= new Fake(id));
globalThis.document = {
  getElementById: part,
  createElement(kind) { const one = new Fake(kind); made.push(one); return one; },
};
const input = JSON.parse(require("fs").readFileSync(0, "utf8"));
part("models").dataset.names = JSON.stringify(input.names);
const asked = [];
globalThis.fetch = async (path, options) => {
  asked.push([path, options.body && JSON.parse(options.body)]);
  const bytes = new TextEncoder().encode(input.answers.shift().map((line) => JSON.stringify(line) + "\\n").join(""));
  const parts = [...bytes].map((byte) => new Uint8Array([byte]));  // characters and lines arrive in pieces
  const read = async () => (parts.length ? { value: parts.shift(), done: false } : { done: true });
  return { body: { getReader: () => ({ read }) } };
};
(0, eval)(input.script);
(async () => {
  part("system").value = input.system;
  for (const question of input.questions) {
    part("question").value = question;
    part("form").heard.submit({ preventDefault() {} });
    while (!part("stop").disabled) await new Promise((done) => setTimeout(done, 1));
  }
  console.log(JSON.stringify({ asked, made: made.map((one) => [one.kind, one.textContent]) }));
})();
"""


@pytest.mark.skipif(not shutil.which("node"), reason="no node here")
def test_a_hostile_answer_is_text_and_the_page_keeps_each_models_conversation():
    script = PAGE.split('<script nonce="NONCE">')[1].split("</script>")[0]
    last = {"told": "(3 tokens)\n", "left": 0}
    answers = [
        *([{"text": HOSTILE[:9]}, {"text": HOSTILE[9:]}, last], [{"text": "é€🙂"}, last]),
        *([{"error": HOSTILE}], [{"text": "yes"}, {**last, "left": 2}]),
        *([last], [{"text": "no"}, last]),
    ]
    given = {"script": script, "names": [HOSTILE, "base"], "answers": answers, "system": HOSTILE}
    questions = [HOSTILE, "And?", "Why?"]
    done = subprocess.run(
        ["node", "-e", FAKE_DOM],
        input=json.dumps(given | {"questions": questions}),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    assert {kind for kind, _ in page["made"]} == {"section", "h2", "div", "p"}
    texts = [text for _, text in page["made"]]
    assert texts.count(HOSTILE) == 5, "name, question on both sides, answer, error"
    assert "é€🙂" in texts
    said = [[(one["role"], one["content"]) for one in body["messages"]] for _, body in page["asked"]]
    assert [body["model"] for _, body in page["asked"]] == [0, 1, 0, 1, 0, 1]
    assert all(one[0] == ("system", HOSTILE) for one in said)
    first = [("user", HOSTILE), ("assistant", HOSTILE)]
    assert said[2][1:] == [*first, ("user", "And?")]
    assert said[4][1:] == [*first, ("user", "Why?")], "a question that failed is forgotten"
    assert said[5][1:] == [("user", "And?"), ("assistant", "yes"), ("user", "Why?")], "what left the context has left"


def test_the_verb_serves_two_models_of_which_one_has_no_template_until_ctrl_c(tmp_path):
    one = save_talker(tmp_path / "one", says="abcdefghijklm")
    two = save_talker(tmp_path / "two", says="nopqrstuvwxyz", template="")
    out, inside = os.pipe()
    child = os.fork()
    if not child:
        code = 99
        try:
            sys.stdout = open(inside, "w")
            sys.stderr = open(os.devnull, "w")
            with choice.applied(choice.current()):
                code = cli.main(["chat", str(one), "--web", "--against", str(two), "--max_new_tokens", "4"])
        finally:
            os._exit(code)
    os.close(inside)
    try:
        with open(out) as lines:
            address = lines.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32,}/", address)
            with urllib.request.urlopen(address, timeout=20) as page:
                assert page.read().decode().count("<script") == 1
            first, second = (answer_of(address, model) for model in range(2))
            assert re.fullmatch("[a-m]{4}", first) and re.fullmatch("[n-z]{4}", second)
            os.kill(child, signal.SIGINT)
            assert lines.read() == "", "nothing else holds the pipe"
    finally:
        os.kill(child, 0 if sys.exc_info()[0] is None else signal.SIGKILL)
        ended = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 130


def answer_of(address, model):
    asked = urllib.request.Request(f"{address}ask", json.dumps(ASKED | {"model": model}).encode())
    with urllib.request.urlopen(asked, timeout=20) as answer:
        *pieces, last = map(json.loads, answer)
    assert "4 tokens, ended by length" in last["told"]
    return "".join(piece["text"] for piece in pieces)
