"""``python -m server_reference``: the server as a process of its own."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn

from .app import create_app
from .store import StoreUnusableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

DESCRIPTION = """\
A small, exact server of the conversation memory tools (append_memory, replay_memory, recall_memory,
list_conversations) and of a team's records (memory_save, memory_update, memory_delete, memory_get, memory_history,
memory_export, memory_scopes), over MCP's Streamable HTTP at /mcp.

When it accepts connections it prints one line with its URL and the credentials it knows. With --db, every append it
acknowledged survives a kill or a power cut; a team's records live in memory only. SIGTERM and Ctrl-C end it at once,
with status 0.
"""
EPILOG = """\
--records FILE holds one change event a line, as memory_history returns it, for example
  {"sequence": 31, "record_id": 812, "at": "2026-09-25T09:14:02.118Z", "operation": "insert",
   "actor": {"user_id": "vasya", "display_name": "Vasya", "client": "codex"}, "reason": "", "revision": 1,
   "before_state": null, "after_state": {"id": 812, "status": "active", "superseded_by": null}}
(on one line). "scope": {"kind": "team", "team_id": "engineering"} in a line keeps that record to one scope. The file
is never written.

With --allow-faults, POST /faults (same credentials) orders a fault, GET /faults lists them, DELETE /faults ends them:
  curl -u demo:demo -H 'content-type: application/json' http://127.0.0.1:PORT/faults \\
       -d '{"kind": "status", "tool": "append_memory", "status": 503, "retry_after": 2, "times": 3}'
kinds: status, stall (seconds), drop, cut, wrong_ack, no_ack, sse; any of them with tool, times (null: for ever),
probability and seed; status, stall and drop also with "when": "before" or "after" the call is carried out.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    sites = dict(options.site or [("demo", "demo")])
    team_tokens = {token: user for user, token in options.team_token}
    loopback = options.host in ("127.0.0.1", "::1", "localhost")
    if options.no_auth and not loopback:
        return _complain(f"--no-auth on {options.host} would open the memory to everybody: only on this machine")
    try:
        app = create_app(
            db=options.db,
            sites=sites,
            read_tokens=options.read_token,
            team_tokens=team_tokens,
            team_members=_members(options.member),
            records=options.records,
            rate=options.rate,
            allow_faults=options.allow_faults,
            # Bound to this machine only, it must not answer a page that had its name resolved to this machine.
            hosts=("127.0.0.1", "::1", "localhost") if loopback else None,
            no_auth=options.no_auth,
            conformance_tools=options.conformance_tools,
        )
        listening = _listen(options.host, options.port)
    except (ValueError, StoreUnusableError) as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"cannot listen on {options.host}, port {options.port}: {error.strerror}")

    host = f"[{options.host}]" if ":" in options.host else options.host
    line = " ".join(
        [
            f"http://{host}:{listening.getsockname()[1]}/mcp",
            *(f"site={name}:{password}" for name, password in sites.items()),
            *(f"read-token={token}" for token in options.read_token),
            *(f"team-token={user}:{token}" for token, user in team_tokens.items()),
        ]
    )
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    try:
        _Server(config, line).run(sockets=[listening])
    finally:
        app.state.store.close()
    return 0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, line: str) -> None:
        super().__init__(config)
        self._line = line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._line, flush=True)  # noqa: T201  # the one line that callers wait for


def _listen(host: str, port: int) -> socket.socket:
    # Not socket.create_server: asyncio switches Nagle's algorithm off only on sockets that name their protocol, and
    # with it on, the second small packet of each answer waits 40 ms for an acknowledgement.
    listening = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    try:
        if os.name == "posix":  # elsewhere the option means that the port may be stolen
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except BaseException:
        listening.close()
        raise
    return listening


def _exit(_signal: int, _frame: FrameType | None) -> NoReturn:
    # uvicorn raises the signal again once it has shut down in order, so this is the way out in both cases.
    raise SystemExit(0)


def _complain(message: str) -> int:
    print(f"server_reference: {message}", file=sys.stderr)  # noqa: T201
    return 2


def _pair(first: str, second: str) -> Any:
    def parse(text: str) -> tuple[str, str]:
        name, colon, secret = text.partition(":")
        if not name or not colon or not secret:
            # argparse would quote the value, which holds a secret.
            raise argparse.ArgumentTypeError(f"must be {first}:{second}, both not empty")
        return name, secret

    return parse


def _member(text: str) -> tuple[str, str, str]:
    parts = text.split(":")
    if len(parts) != 3 or not all(parts):
        raise argparse.ArgumentTypeError("must be TEAM:USER:ROLE")
    return parts[0], parts[1], parts[2]


def _members(given: Iterable[tuple[str, str, str]] | None) -> dict[str, dict[str, str]] | None:
    if given is None:
        return None
    members: dict[str, dict[str, str]] = {}
    for team, user, role in given:
        members.setdefault(team, {})[user] = role
    return members


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m server_reference",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=0, help="port to listen on; 0, the default, takes any free one")
    add("--db", metavar="FILE", help="SQLite file for the conversations (default: memory only)")
    add(
        "--site",
        metavar="NAME:PASSWORD",
        type=_pair("NAME", "PASSWORD"),
        action="append",
        help="a site's Basic credentials; repeat for several (default: demo:demo)",
    )
    add(
        "--read-token",
        metavar="TOKEN",
        action="append",
        default=[],
        help="a read-only Bearer token, which every site tool refuses with unprocessable_parameters; may be repeated",
    )
    add(
        "--team-token",
        metavar="USER:TOKEN",
        type=_pair("USER", "TOKEN"),
        action="append",
        default=[],
        help="a user's personal Bearer token for the team's records; may be repeated",
    )
    add(
        "--member",
        metavar="TEAM:USER:ROLE",
        type=_member,
        action="append",
        help="a team's member, as reader, editor or manager; repeat for several (default: every team is open to all)",
    )
    add("--records", metavar="FILE", help="change events that the team's records begin with, see below")
    add(
        "--rate", metavar="N", type=float, help="tool calls allowed a second and site; more get HTTP 429 (default: any)"
    )
    add("--allow-faults", action="store_true", help="serve /faults, where misbehaviour can be ordered, see below")
    add(
        "--no-auth",
        action="store_true",
        help="take a caller without credentials for the first site; only with a --host of this machine",
    )
    add(
        "--conformance-tools",
        action="store_true",
        help="serve the tools that the protocol's public conformance suite asks for too",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
