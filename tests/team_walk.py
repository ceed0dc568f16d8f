"""A random walk through the tools of team records: the same calls, of several users, on two servers.

What to call is drawn from a seed, and from the ids that the first server gave so far, so that most calls meet a record.
Texts, tags, ids, pages and scopes are drawn near the edges: of a limit, of what two texts have in common, of what is
taken for a secret. A record of a walk (:func:`walked`) is a list of calls, each with what it was answered.
"""

from __future__ import annotations

import json
import re
import unicodedata
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
from team_oracle import CASSETTE as SCENARIO
from team_oracle import TEAM, USERS, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from team_oracle import Place

CASSETTE = SCENARIO.with_name(f"{SCENARIO.stem}-walk.jsonl")
RECORDED_SEED = 4

Call = tuple[str, str, dict[str, Any]]
"""Who calls what with which arguments."""

Answer = tuple[bool, Any]
"""Whether it is an error, and what it says: JSON, or text that is none."""

PHRASES = (
    "Use the pool",
    "it's done, at 10:30 in /var/log",
    "Ёлка зелёная",
    "нет",
    "тест тоже",
    "Straße offen",
    "ﬁne print",
    "İstanbul calling",
    "ΟΔΟΣ",
    "naïve café",
    "ｗｉｄｅ words",
    "日本語 テスト",
    "हिन्दी में",
    "1 2",
    "v1.2.3-rc4",
    "a_b c-d",
    "AND OR NOT",
    'say "hello" (now)',
    "!!",
    "👍",
    "x\x00y",
    "e",
    "ab cd " * 20,
)
SECRETS = (
    "ann@example.org",
    "ann.o+x@mail.example.co.uk.",
    "a@b",
    "password: hunter2",
    "db_Password=hunter2;",
    "my secret = s, more",
    "secrets: none",
    "the password is foo",
    "client-secret-2:x",
    "token: abc",
    "tokens: abc",
    "mytoken=abc",
    "api key: x",
    "api_key=x",
    "API-KEY : x",
    "access_key:x",
    "Bearer abc.def",
    "forbearer x",
    "Authorization Basic",
    "authorization: x",
    "4111 1111 1111 1111",
    "4111-1111-1111-1111",
    "4111111111111111",
    "41111111111111111",
    "x-4111111111111111",
    "1234567812345678",
    "https://user:pass@host/x",
    "postgres+x://user:p:w@host",
    "http://user@host",
    "sk-" + "a" * 20,
    "sk_" + "a" * 19,
    "sk-ant-" + "a1_" * 8,
    "rk_live_" + "a" * 16,
    "pk-proj-" + "a-" * 10,
    "ghp_" + "a" * 36,
    "gho_" + "a" * 30,
    "github_pat_" + "a_" * 12,
    "glpat-" + "a" * 20,
    "xoxb-" + "1-" * 6,
    "hf_" + "a" * 30,
    "npm_" + "a" * 36,
    "AKIAABCDEFGHIJKLMNOP",
    "akiaabcdefghijklmnop",
    "AIza" + "a" * 35,
    "123456789:AA" + "a" * 33,
    "https://hooks.slack.com/services/T0/B0/x",
    "eyJ" + "a" * 20 + "." + "b" * 20 + ".c",
    "eyJ" + "a" * 20 + "." + "b" * 5,
    "-----BEGIN RSA PRIVATE KEY-----\nx\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\nx",
)
PRIVATE = (
    "<private>b</private>",
    "< PRIVATE >b</ private >",
    "<private>b<private>c</private>d</private>",
    "</private>",
    "<private>",
    "<private></private>",
    "<private\n>b",
)
# Of none of these does the real server's vocabulary know a better word, which it would add.
TAGS = ("zzz", " Zzz ", "ZZZ", "", " ", "ünïß", "ÜNÏẞ", "ijxqw", "İj", "e\u0301ww", "ж", "\U0001f44d", "token: abc")
PROJECTS = ("general", "General", " billing", "billing", "проект", "e\u0301", "\u00e9", "p" * 128)
KINDS = ("fact", "decision", "solution", "lesson", "convention")
SCOPES: tuple[dict[str, Any] | None, ...] = (
    None,
    {},
    {"kind": "personal", "team_id": None},
    {"kind": "team", "team_id": TEAM.team_id},
    {"kind": "shared"},
)
ODD_SCOPES: tuple[Any, ...] = (
    {"kind": "team"},
    {"kind": "team", "team_id": None},
    {"team_id": TEAM.team_id},
    {"kind": "shared", "team_id": "x"},
    {"kind": "team", "team_id": "Engineering"},
    {"kind": "team", "team_id": "a b"},
    {"kind": "team", "team_id": "engineering\n"},
    {"kind": "company"},
    {"kind": None},
    {"owner": "x"},
    None,
    "team",
    [],
)
REQUEST_IDS = tuple(f"6f1f8c1e-58a8-4a0e-9a55-0d8e4a9d7c{n:02x}" for n in range(30))
ODD_REQUEST_IDS = ("", "zz", REQUEST_IDS[0][:-1], f" {REQUEST_IDS[0]}", "6f1f8c1e58a8-4a0e-9a55-0d8e4a9d7c00", 5)


class Walk:
    """Draws calls. ``learn`` tells it what the last one was answered. ``brief`` leaves out long texts and pages."""

    def __init__(self, seed: int, *, brief: bool = False) -> None:
        self.random = Random(seed)
        self.brief = brief
        self.known: dict[str, dict[int, int]] = {}
        self.said: list[str] = list(PHRASES)
        self.sent: list[Call] = []

    def draw(self) -> Call:
        """The next call; now and then an earlier one word for word."""
        if self.sent and self.random.random() < 0.05:
            return self.random.choice(self.sent)
        user = self.random.choices(USERS, (5, 4, 1, 1))[0]
        tool, make = self.random.choices(
            (
                ("memory_save", self._save),
                ("memory_update", self._update),
                ("memory_delete", self._delete),
                ("memory_get", self._get),
                ("memory_history", self._history),
                ("memory_export", self._page),
            ),
            (10, 6, 2, 1, 4, 1),
        )[0]
        scope = self.random.choice(SCOPES if self.random.random() < 0.95 else ODD_SCOPES)
        place = place_of(user, scope)
        arguments = make(place) | ({} if scope is None and self.random.random() < 0.95 else {"scope": scope})
        if self.random.random() < 0.02:
            arguments = self._spoilt(arguments)
        call = user, tool, arguments
        self.sent.append(call)
        return call

    def learn(self, call: Call, answer: Answer) -> None:
        user, _, arguments = call
        failed, said = answer
        if failed:
            return
        records = said["data"] if isinstance(said["data"], list) else [said["data"]]
        for record in records:
            if "revision" in record and "status" in record:
                known = self.known.setdefault(place_of(user, arguments.get("scope")), {})
                known[record["id"]] = record["revision"]

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _save(self, _: str) -> dict[str, Any]:
        return {"content": self._text(200_000)} | self._some(
            type=lambda: self.random.choice(KINDS),
            project=lambda: self.random.choice(PROJECTS),
            tags=lambda: self.random.choices(TAGS, k=self.random.choice((0, 1, 2, 3, 64))),
            context=lambda: self._text(200_000),
            importance=lambda: self.random.choice(("low", "medium", "high", "critical")),
            source_format=lambda: self.random.choice(("auto", "conversation")),
            branch=lambda: self.random.choice(("", "main", " Ünï ", "b" * 128, "token: abc")),
            request_id=self._request_id,
        )

    def _update(self, place: str) -> dict[str, Any]:
        return self._delete(place) | {"content": self._text(200_000)}

    def _delete(self, place: str) -> dict[str, Any]:
        chosen = self._get(place)
        revision = self.known.get(place, {}).get(chosen["id"], 1)
        if self.random.random() < 0.1:
            revision = self.random.choice((1, 2, 3, 2**63 - 1))
        more = self._some(request_id=self._request_id)
        return chosen | {"expected_revision": revision, "reason": self._text(2000)} | more

    def _get(self, place: str) -> dict[str, Any]:
        known = list(self.known.get(place, ()))
        if not known or self.random.random() < 0.05:
            return {"id": self.random.choice((1, 2, 4711, 2**63 - 1, 2**63))}
        # Most often one of the newest: the older ones are closed.
        return {"id": self.random.choice(known[-4:] if self.random.random() < 0.7 else known)}

    def _history(self, place: str) -> dict[str, Any]:
        return self._get(place) | self._page(place)

    def _page(self, _: str) -> dict[str, Any]:
        return self._some(
            after=lambda: self.random.choice((0, 1, 5, 20, 60, 10_000, 2**63 - 1)),
            limit=lambda: self.random.choice((1, 2, 5, 49, 50)),
        ) | ({"limit": self.random.choice((1, 2, 3))} if self.brief else {})

    def _some(self, **made: Callable[[], Any]) -> dict[str, Any]:
        return {name: make() for name, make in made.items() if self.random.random() < 0.3}

    def _request_id(self) -> Any:
        if self.random.random() < 0.05:
            return self.random.choice(ODD_REQUEST_IDS)
        one = self.random.choice(REQUEST_IDS)
        return self.random.choice((one, one, one.upper(), f"{{{one}}}", f"urn:uuid:{one}", one.replace("-", ""), None))

    def _spoilt(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if not arguments:
            return {"another": 1}
        name = self.random.choice(list(arguments))
        wrong = self.random.choice((None, 0, -1, 1.0, 1.5, True, "", "1", " ", [], {}, [5], "x" * 129, ["x" * 129]))
        worse = self.random.choice((None, wrong, ["a"] * 65, ["scope:x"], ["SCOPE:x"], 51, 10**30))
        how = self.random.randrange(4)
        if how == 0:
            return {key: value for key, value in arguments.items() if key != name}
        if how == 1:
            return arguments | {"another": wrong, "one": 1}
        return arguments | {name: wrong if how == 2 else worse}

    def _text(self, most: int) -> str:
        if self.random.random() < 0.03:
            # With spaces: on a text of one long word the real server spends minutes.
            full = ("\U0001f44d " * most)[: 1 if self.brief else most]
            return self.random.choice(("", " ", "\n\u00a0", full, f"{full}x", f"{full[:-6]}a@b.co"))
        text = self.random.choice(self.said[-12:] if self.random.random() < 0.7 else self.said)
        for _ in range(self.random.choice((0, 0, 1, 1, 2))):
            text = self.random.choice(VARIANTS)(self.random, text)
        if len(text) <= 400:
            self.said.append(text)
        return text[:most]


def _with(parts: tuple[str, ...], between: tuple[str, ...] = (" ", "\n", ", ")) -> Callable[[Random, str], str]:
    def join(random: Random, text: str) -> str:
        pieces = [text, random.choice(parts)]
        random.shuffle(pieces)
        return random.choice(between).join(pieces)

    return join


VARIANTS: tuple[Callable[[Random, str], str], ...] = (
    lambda _, text: text.upper(),
    lambda _, text: text.lower(),
    lambda _, text: text.swapcase(),
    lambda _, text: text + ".",
    lambda _, text: f"({text.replace(' ', ',  ')})\n",
    lambda _, text: text.replace("ё", "е").replace("Ё", "Е"),
    lambda _, text: unicodedata.normalize("NFD", text),
    lambda _, text: unicodedata.normalize("NFC", text),
    lambda _, text: unicodedata.normalize("NFKC", text),
    _with(PHRASES[:-1]),
    _with(SECRETS),
    _with(PRIVATE, ("", " ")),
)


def place_of(user: str, scope: Any) -> str:
    """Where the call goes, as one word."""
    kind = scope.get("kind") if isinstance(scope, dict) else None
    return str(kind) if kind in ("team", "shared") else user


# -- walking ----------------------------------------------------------------------------------------------------------


def ask(client: httpx.Client, place: Place, call: Call) -> Answer:
    user, tool, arguments = call
    response = client.post(
        place.url,
        json={"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}},
        headers={"authorization": f"Bearer {place.tokens[user]}", "accept": "application/json, text/event-stream"},
    )
    assert response.status_code == 200, response.text[:500]
    result = response.json()["result"]
    assert "structuredContent" not in result
    (block,) = result["content"]
    text = settled(block["text"])
    try:
        return result["isError"], json.loads(text)
    except ValueError:
        return result["isError"], text


def agree(real: Answer, ours: Answer) -> bool:
    """Whether two answers say the same. Of a refused value, the real one says more than ours in the message."""
    if real == ours:
        return True
    (failed, said), (failed_too, said_too) = real, ours
    codes = [one.get("code") if isinstance(one, dict) else None for one in (said, said_too)]
    return failed and failed_too and codes == ["invalid_request"] * 2


def walked(place: Place, seed: int, steps: int, *, brief: bool = False) -> list[Any]:
    """A walk on one server: the calls, each with what it was answered."""
    walk, record = Walk(seed, brief=brief), []
    with httpx.Client(trust_env=False, timeout=60) as client:
        for _ in range(steps):
            call = walk.draw()
            answer = ask(client, place, call)
            walk.learn(call, answer)
            record.append([*call, *answer])
    return record


def differences(place: Place, record: Iterable[Any]) -> list[str]:
    """Where the server answers otherwise than the record has it. Stops at the second: one leads to the next."""
    found: list[str] = []
    with httpx.Client(trust_env=False, timeout=60) as client:
        for number, (user, tool, arguments, *answer) in enumerate(record):
            ours = ask(client, place, (user, tool, arguments))
            if not agree(tuple(answer), ours):
                found.append(
                    f"call {number}: {user} {tool} {_short(arguments)}\n  real {_short(answer)}\n  ours {_short(list(ours))}"
                )
            if len(found) == 2:
                break
    return found


def recorded() -> list[Any]:
    return [json.loads(line) for line in CASSETTE.read_text("utf-8").splitlines()]


def _short(value: Any) -> str:
    text = re.sub(r"(.{2,13}?)\1{30,}", r"\1...", json.dumps(value, sort_keys=True))
    return text if len(text) <= 1500 else f"{text[:1500]} ... ({len(text):,} characters)"
