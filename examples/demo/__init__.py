"""The whole promise in one run: appends that never wait, an outage, a ``kill -9``, a restart, and nothing missing.

    __main__.py    the command: ``python -m examples.demo [FILE.jsonl]``
    conductor.py   starts the server and the appender, kills each of them once, and calls the judge at the end
    children.py    the two child processes: what they say, and how they are stopped
    appender.py    an agent's process, the only one that uses memlog: appends, and after the kill reads and goes on
    script.py      what is to be appended: the file, repeated under fresh ids
    rawlog.py      reads a conversation over plain HTTP, without memlog
    judge.py       compares what should be there with what is there; pure functions
    display.py     the line that moves, and the table at the end

The conductor never imports memlog. It believes only the server's answers over plain HTTP and the record that the
appender writes of each ``stored()``, one unbuffered line an item.
"""
