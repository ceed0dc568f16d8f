"""Read what can be read, and say whether that is all."""

import memlog.sync

with memlog.sync.open_log(flush_timeout=0) as log:
    replay = log.conversation("c_tutorial_1").replay(on_unavailable="pending")
    texts = [item.payload["text"] for item in replay]
    print(*texts, sep="\n")
    if replay.degraded:
        print("(the server is away: there may be more)")
