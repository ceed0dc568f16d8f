"""Count what an operator should hear of."""

from collections import Counter

import memlog.sync
from memlog.events import Event

seen: Counter[str] = Counter()


def watch(event: Event) -> None:
    seen[event.kind] += 1
    if event.kind in ("blocked", "refused", "sealed"):
        print("somebody has to look:", event.kind, event.conversation_id or "", event.reason)


with memlog.sync.open_log(on_event=watch) as log:
    log.conversation("c_watched_1").append({"text": "hello"})
    log.flush(timeout=5)
    now = log.statistics()
    print(f"{now.state}: {now.pending_items} pending, {now.refused_items} refused")

print(f"{seen['acknowledged']} request(s) acknowledged")
