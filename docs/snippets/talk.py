"""Say something twice a second, and show what memlog makes of it."""

import sys
import time

import memlog.sync

turns = int(sys.argv[1])

with memlog.sync.open_log() as log:
    chat = log.conversation("c_tutorial_1")
    for number in range(1, turns + 1):
        chat.append({"role": "user", "text": f"turn {number}"})
        time.sleep(0.5)
        now = log.statistics()
        print(f"turn {number:2}   {now.pending_items:2} pending   {now.state}", flush=True)
