"""A pytest plugin (`-p alias_httpx2`): `import httpx` gives httpx2, and httpcore httpcore2, for memlog and all others.

Named on the command line it is loaded before any other plugin, and so before anybody imports httpx. respx needs no
exception: it patches what it finds under these names.
"""

from __future__ import annotations

import httpx2

httpx2.alias_httpx()


def pytest_report_header() -> str:
    from memlog import transport

    # Or the run would show nothing.
    assert transport.httpx is httpx2
    assert issubclass(transport.BaseTransport, httpx2.AsyncBaseTransport)
    return f"httpx is httpx2 {httpx2.__version__}"
